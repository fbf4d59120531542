"""Maps failures of the database to our errors: unavailable now, or anything else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from bdn.core.errors import InvalidRequestError, StoreUnavailableError

# Classes of SQLSTATE (PostgreSQL, appendix A): connection, lost a race, out of resources, not in the state for it,
# operator intervention. After all of them the same statement may succeed.
_AWAY: Final = ("08", "40", "53", "55", "57")
_REFUSED: Final = {  # SQLite accepts both: it finds nothing by that name, and stores such a number
    "22021": "a name cannot contain a NUL",
    "22P02": "a document cannot contain infinite numbers or NaN",
}


class DatabaseUnavailableError(StoreUnavailableError):
    """The database does not answer now; the same statement may succeed later."""


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Map the database failures of the whole block. ``IntegrityError`` passes through."""
    try:
        yield
    except IntegrityError:
        raise  # for the caller: two requests inserted the same row
    except (SQLAlchemyError, OSError) as error:
        if problem := _REFUSED.get(_state_of(error)):
            raise InvalidRequestError(problem) from error
        said = getattr(error, "strerror", None) or (error.args[0] if error.args else "no answer in time")
        reason = f"database: {type(error).__name__}: {said}"
        raise (DatabaseUnavailableError if _is_away(error) else StoreUnavailableError)(reason) from error


def _is_away(error: SQLAlchemyError | OSError) -> bool:
    """Whether the same statement may succeed later. A driver raises OSError if it finds no server."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (OSError, PoolTimeoutError))
    state = _state_of(error)
    return error.connection_invalidated or state[:2] in _AWAY or isinstance(error, (OperationalError, InterfaceError))


def _state_of(error: SQLAlchemyError | OSError) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
