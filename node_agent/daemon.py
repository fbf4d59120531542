"""The daemon in the foreground: settings, log, and the agent until a signal."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from bdn.cli.logs import log_to_stderr
from bdn.cli.output import DONE, INTERRUPTED, USAGE, Output, exit_code_of, say_wrong_settings
from bdn.core.errors import BdnError
from bdn.net.host_lookups import run_program
from bdn.settings import SettingsError, warn_of_service_links
from bdn.traces.export import exporting
from node_agent.api import serving_api
from node_agent.app import open_agent
from node_agent.settings import AgentSettings, load_settings


def run(roles: str | None) -> int:
    """Run until a signal; returns the exit code. ``roles`` None: from the settings."""
    try:
        settings = load_settings(**({"roles": roles} if roles is not None else {}))
    except SettingsError as error:
        say_wrong_settings(error)
        return USAGE
    log_to_stderr(settings.log)
    warn_of_service_links()
    try:
        return run_program(serve(settings))
    except BdnError as error:
        Output.error(error)
        return exit_code_of(error)


async def serve(settings: AgentSettings) -> int:
    """Run the daemon until a signal; returns the exit code.

    SIGTERM drains: requests are refused, fills are canceled with their bitmaps written, and nothing is unmounted,
    because stages survive. SIGINT does the same and is reported as an interruption.

    Raises ``BdnError`` if the agent cannot start, e.g. another process uses its directory, its socket or a port.
    """
    with _signals() as stop:
        facts = {"node": settings.node, "cluster": settings.cluster}
        traces = exporting(settings.otlp_endpoint, "bdn-node-agent", **facts)
        async with traces, open_agent(settings) as agent, serving_api(agent):
            return await stop


@contextmanager
def _signals() -> Iterator[asyncio.Future[int]]:
    """Yields a future that resolves to the exit code at SIGTERM or SIGINT."""
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
