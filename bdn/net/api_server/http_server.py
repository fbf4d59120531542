"""An API's HTTP server inside a running event loop: uvicorn, with its sockets, its end, its timeout and its complaints ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bdn.core.errors import InUseError, InvalidRequestError
from bdn.core.groups import single_error

REQUEST_SECONDS: Final = 30.0  # for head and body, which is some megabytes at most
_IN_PART: Final = (h11.IDLE, h11.SEND_BODY)
_GRACE_SECONDS = 5  # for answers that are under way when the service stops


logger = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 60.0
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TimedProtocol(H11Protocol):
    """Closes a connection that takes longer than ``request_seconds`` for one request, from its first byte or from connecting.

    uvicorn's own timeouts begin after an answer.
    """

    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected, and has sent nothing yet."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a request, all of it, or several."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in _IN_PART:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Leaves signals to the program, which may run several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Released:
    """Ends without an error when the server cancels an answer that is under way at its end: a client may not have read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # nobody else cancels this task, which ends here
            await self._app(scope, receive, send)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening address; port 0 takes a free one.

    Raises:
        InUseError: another process listens there.
        InvalidRequestError: the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise binding_error(host, port, error) from error
    return listener


def binding_error(host: str, port: int, error: OSError) -> InUseError | InvalidRequestError:
    """What it means that an address could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return InUseError(f"port {port} of {host}", ("another process",))
    return InvalidRequestError(f"cannot listen on {host} port {port}: {error.strerror or error}")


@asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Answer requests on ``listener``, which this closes, until the block ends."""
    config = uvicorn.Config(
        _Released(app),
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    log_shortages()
    with single_error(), contextlib.closing(listener):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started and not task.done():
                    await asyncio.sleep(0.005)
                yield
            finally:
                server.should_exit = True
                await asyncio.wait([task])  # or the group would cut it off when the block failed or was canceled


class _ShortageHandler:
    """A loop's exception handler that logs a shortage of descriptors once in a while; other errors go to the one before."""

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


def log_shortages() -> None:
    """For the running loop. Asyncio would log a traceback for each place of the backlog, each second."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_exception_handler(), _ShortageHandler):
        loop.set_exception_handler(_ShortageHandler(loop))
