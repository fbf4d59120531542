"""The agent as a service: its API on its sockets, and what signals do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from bdn.cli.output import DONE, INTERRUPTED
from bdn.net.api_server.http_server import bind_tcp, serving
from node_agent.api import build_app
from node_agent.app import open_agent
from node_agent.settings import AgentSettings
from node_agent.sockets import unix_socket


async def serve(settings: AgentSettings) -> int:
    """Run the daemon until a signal; returns the exit code.

    SIGTERM drains: no more requests, fills are canceled with their bitmaps written, and nothing is unmounted, because
    stages survive. SIGINT does the same and is reported as an interruption.

    Raises:
        BdnError: the agent cannot start: its directory, its socket or a port is somebody else's.
    """
    with _signals() as stop:
        async with AsyncExitStack() as stack:
            agent = await stack.enter_async_context(open_agent(settings))
            app = build_app(agent)
            await stack.enter_async_context(serving(app, stack.enter_context(unix_socket(settings.effective_socket))))
            if settings.port is not None:  # without authentication of its own, the API is for this machine alone
                await stack.enter_async_context(serving(app, bind_tcp("127.0.0.1", settings.port)))
            return await stop


@contextmanager
def _signals() -> Iterator[asyncio.Future[int]]:
    """The exit code, once a signal says that it is time."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()
    codes = {signal.SIGTERM: DONE, signal.SIGINT: INTERRUPTED}

    def note(code: int) -> None:
        if not stop.done():
            stop.set_result(code)

    for number, code in codes.items():
        loop.add_signal_handler(number, note, code)
    try:
        yield stop
    finally:
        for number in codes:
            loop.remove_signal_handler(number)
