"""What goes wrong with a database, in our words: whether it is away and may come back, or something else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from bdn.core.errors import InvalidRequestError, StoreUnavailableError

# Classes of SQLSTATE (PostgreSQL, appendix A): connection, lost a race, out of resources, not in the state for it,
# operator intervention. After all of them the same statement may succeed.
_AWAY: Final = ("08", "40", "53", "55", "57")
_REFUSED: Final = {  # what SQLite takes: it finds nothing of that name, and keeps such a number
    "22021": "text with a NUL in it is the name of nothing here",
    "22P02": "a document with numbers that are infinite, or none, is not kept here",
}


class DatabaseUnavailableError(StoreUnavailableError):
    """The database does not answer, or not now."""


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Database failures become ours, around the whole block."""
    try:
        yield
    except IntegrityError:
        raise  # the callers' own: two requests made the same row
    except (SQLAlchemyError, OSError) as error:
        if problem := _REFUSED.get(_state_of(error)):
            raise InvalidRequestError(problem) from error
        said = getattr(error, "strerror", None) or (error.args[0] if error.args else "no answer in time")
        reason = f"database: {type(error).__name__}: {said}"
        raise (DatabaseUnavailableError if _is_away(error) else StoreUnavailableError)(reason) from error


def _is_away(error: SQLAlchemyError | OSError) -> bool:
    """Whether the same statement may succeed later. An OSError is how a driver fails that finds no server."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (OSError, PoolTimeoutError))
    state = _state_of(error)
    return error.connection_invalidated or state[:2] in _AWAY or isinstance(error, (OperationalError, InterfaceError))


def _state_of(error: SQLAlchemyError | OSError) -> str:
    """The SQLSTATE, where there is one."""
    return str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
