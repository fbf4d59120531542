"""``bdn up``: a mirror and an agent on this machine as services."""

from __future__ import annotations

import click

from bdn.cli.collector import spare_collector
from bdn.cli.embedding import running_services
from bdn.cli.logs import log_to_stderr
from bdn.cli.output import Output, command_line
from bdn.cli.running import stop_signal
from bdn.mirror.settings import MirrorSettings


@click.command()
@command_line
async def up(output: Output) -> None:
    """Run a mirror and an agent on this machine until they are interrupted, and print their addresses.

    \b
    Example: bdn up &
    """
    log_to_stderr()
    spare_collector()
    with stop_signal() as stop:
        async with running_services(MirrorSettings(), program="bdn up", serve=True) as services:
            mirror, agent = services.mirror, services.agent
            output.result(
                {"mirror": mirror.url, "data_port": mirror.service.data_port, "agent": agent.address},
                [f"mirror at {mirror.url} (documentation at {mirror.url}/docs)", f"agent at {agent.address}"],
            )
            await stop.wait()
