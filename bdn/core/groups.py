"""One error out of several: what leaves a part is one of our errors, not a group of them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_error() -> Iterator[None]:
    """Around a ``TaskGroup``: raises its first failure alone. The others were canceled because of it, or came too late."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
