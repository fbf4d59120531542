"""A process whose descriptors are used up says so once in a while, and takes connections again when it can."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

logger = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 60.0
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@contextmanager
def shortage_told() -> Iterator[None]:
    """For the loop that runs: asyncio reports a shortage with a traceback for each place of the backlog, each second."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    told_at = -_AGAIN_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        error = context.get("exception")
        if isinstance(error, ValueError) and "._start_serving(" in context["message"]:
            return  # a second after a shortage asyncio listens again, once for each place; the socket has been closed since
        if "socket" in context and isinstance(error, OSError) and error.errno in _SHORTAGES:
            if (now := time.monotonic()) - told_at >= _AGAIN_SECONDS:
                told_at = now
                logger.warning("connections have to wait: %s; see ulimit -n", error.strerror)
        elif before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
