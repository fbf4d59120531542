"""The driver in the foreground: settings, log, clients and sockets, until a signal."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from functools import partial

from bdn.cli.logs import log_to_stderr
from bdn.cli.output import DONE, USAGE, Output, exit_code_of, say_wrong_settings
from bdn.core.errors import BdnError, single_error
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.host_lookups import run_program
from bdn.net.tls import Authorities
from bdn.settings import SettingsError, warn_of_service_links
from node_agent.csi.node import NodeVolumes
from node_agent.csi.server import serving
from node_agent.csi.settings import CsiSettings


def run() -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. Mounts stay."""
    try:
        settings = CsiSettings()
    except SettingsError as error:
        say_wrong_settings(error)
        return USAGE
    log_to_stderr(settings.log)
    warn_of_service_links()
    os.umask(0o077)  # the sockets are for root
    try:
        return run_program(serve(settings))
    except BdnError as error:
        Output.error(error)
        return exit_code_of(error)


async def serve(settings: CsiSettings) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    socket = settings.agent_socket or settings.data_dir / "agent.sock"
    with single_error():
        async with AsyncExitStack() as stack:
            agent = await stack.enter_async_context(AgentClient(f"unix:{socket}"))
            mirror = partial(MirrorClient, settings.url, authorities=Authorities(settings.tls_ca))
            volumes = NodeVolumes(settings, agent, mirror)
            work = await stack.enter_async_context(asyncio.TaskGroup())
            await stack.enter_async_context(serving(volumes, work))
            cleaning = work.create_task(volumes.release_abandoned())
            await stopped.wait()
            cleaning.cancel()
    return DONE
