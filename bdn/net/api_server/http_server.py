"""A control plane's HTTP server inside a running event loop: uvicorn, with its sockets bound and its end decided by us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from bdn.core.errors import InUseError, InvalidRequestError
from bdn.core.groups import single_error
from bdn.net.api_server.descriptor_shortage import tell_shortages
from bdn.net.api_server.impatience import ImpatientProtocol

_GRACE_SECONDS = 5  # for answers that are under way when the service stops


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
        http=ImpatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    tell_shortages()
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
