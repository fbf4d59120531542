"""The process of a service in the foreground."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bdn.cli.collector import spare_collector
from bdn.cli.logs import log_to_stderr
from bdn.disk.syscalls import trim_heaps
from bdn.mirror.db.waiting import in_background
from bdn.mirror.settings import MirrorSettings
from bdn.settings import warn_of_service_links
from bdn.traces.export import exporting

# How long a computing thread holds Python's lock. With the default of 5 ms a heartbeat, which changes threads a hundred
# times, took 4.4 s beside a plan of a million files; now it takes 0.9 s, and the plan as long as before
# (docs/benchmarks.md).
_SWITCH_SECONDS: Final = 0.0005
_TRIM_SECONDS: Final = 30.0


@asynccontextmanager
async def in_the_foreground(settings: MirrorSettings, service: str) -> AsyncIterator[asyncio.Event]:
    """Set up the process of a service: logs, collector, threads, traces. ``service`` is its name in traces.

    Yields an event that the first SIGTERM or SIGINT sets; a second SIGINT interrupts.
    """
    log_to_stderr(settings.log)
    warn_of_service_links()
    spare_collector()
    sys.setswitchinterval(_SWITCH_SECONDS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with in_background(_keep_trimming()), exporting(settings.otlp_endpoint, service):
            yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _keep_trimming() -> None:
    """Without trimming, a service holds the memory of a manifest of a million files, and the next one adds to it.

    Figures: docs/benchmarks.md.
    """
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        await asyncio.to_thread(trim_heaps)
