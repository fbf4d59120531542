"""A process whose descriptors are used up says so once in a while, and takes connections again when it can."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any, Final

logger = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 60.0
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Handler:
    """What a loop does with errors of callbacks; those that are no shortage go where they went before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._before = loop.get_exception_handler()
        self._told_at = -_AGAIN_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ValueError) and "._start_serving(" in context["message"]:
            return  # a second after a shortage asyncio listens again, once for each place; the socket has been closed since
        if "socket" in context and isinstance(error, OSError) and error.errno in _SHORTAGES:
            if (now := time.monotonic()) - self._told_at >= _AGAIN_SECONDS:
                self._told_at = now
                logger.warning("connections have to wait: %s; see ulimit -n", error.strerror)
        elif self._before is None:
            loop.default_exception_handler(context)
        else:
            self._before(loop, context)


def tell_shortages() -> None:
    """For the rest of the running loop's life: asyncio reports a shortage with a traceback for each place of the backlog.

    It does so each second, and once more a second later, when the server may have ended.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_exception_handler(), _Handler):
        loop.set_exception_handler(_Handler(loop))
