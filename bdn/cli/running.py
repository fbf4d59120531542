"""Services in this process: until somebody asks them to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from bdn.mirror.app import MirrorService, open_mirror
from bdn.mirror.settings import MirrorSettings
from bdn.net.api_server.http_server import bind_tcp, serving


@dataclass(frozen=True)
class RunningMirror:
    """A mirror that answers at ``url``."""

    service: MirrorService
    url: str


@asynccontextmanager
async def running_mirror(settings: MirrorSettings, program: str = "bdn serve") -> AsyncIterator[RunningMirror]:
    """API, worker and data plane of a mirror, answering until the block ends."""
    async with open_mirror(settings, program=program) as service:
        listener = bind_tcp(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        async with serving(service.api, listener):
            try:
                yield RunningMirror(service, f"http://{f'[{host}]' if ':' in host else host}:{port}")
            finally:
                service.watch.stop()  # open requests are answered now, not when their time is over


@contextmanager
def stop_signal() -> Iterator[asyncio.Event]:
    """Set by the first SIGTERM or SIGINT; a second SIGINT interrupts as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
