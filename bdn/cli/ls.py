"""``bdn-admin ls`` and ``bdn-admin agents``: holdings and agents."""

from datetime import UTC, datetime

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import Output, command_line
from bdn.core.units import counted, format_size
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifest


@click.command()
@command_line
async def ls(output: Output) -> None:
    """List manifests and where they are cached.

    \b
    Example: bdn-admin ls --json
    """
    async with reachable_mirror(output) as client:
        held = await client.held()
    lines = [line for item in sorted(held.items, key=lambda item: item.sources) for line in _held_lines(item)] or [
        "no manifests"
    ]
    if held.store is not None:
        use = held.store
        disk = ""
        if use.disk_free is not None and use.disk_total is not None:
            disk = f"; its disk has {format_size(use.disk_free)} free of {format_size(use.disk_total)}"
        lines.append(f"the mirror's store holds {format_size(use.bytes_stored)} of files{disk}")
    output.result(held, lines, [item.manifest for item in held.items])


def _held_lines(item: HeldManifest) -> list[str]:
    size = "" if item.bytes_total is None else f", {counted(item.files_total, 'file')}, {format_size(item.bytes_total)}"
    place = ", on the mirror" if item.mirror else ""
    if item.restorable_until is not None:
        is_over = item.restorable_until < datetime.now(UTC)
        until = "the next collection" if is_over else f"{item.restorable_until:%Y-%m-%d %H:%M}Z"
        place = f", evicted from the mirror, whose disk keeps it until {until}"
    lines = [f"{', '.join(item.sources)}  {item.manifest}{size}{place}"]
    for node, holding in item.nodes.items():
        state = "whole" if holding.complete else "incomplete"
        holders = f", in use by {', '.join(holding.held_by)}" if holding.held_by else ""
        chunks = f", {format_size(holding.cluster_bytes)} for its cluster" if holding.cluster_bytes else ""
        lines.append(f"  {node}: {state}, {format_size(holding.bytes)}{chunks}{holders}")
    return lines


class _ListsAlone(click.Group):
    """Runs ``ls`` if no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_listing = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        return super().parse_args(ctx, ["ls", *args] if is_listing else args)


@click.group(cls=_ListsAlone)
def agents() -> None:
    """List agents with capacity and last heartbeat; remove retired agents."""


@agents.command("ls")
@command_line
async def list_agents(output: Output) -> None:
    """List agents with capacity and last heartbeat.

    \b
    Example: bdn-admin agents ls
    """
    async with reachable_mirror(output) as client:
        found = await client.agents()
    names = [f"{agent.cluster}/{agent.node}" for agent in found.items]
    output.result(found, [line for agent in found.items for line in _agent_lines(agent)] or ["no agents"], names)


@agents.command("rm")
@click.argument("node")
@click.option("--cluster", metavar="NAME", help="The cluster of NODE, where several clusters have a node of this name.")
@command_line
async def remove_agent(output: Output, *, node: str, cluster: str | None) -> None:
    """Remove a retired agent and the record of its cache. A live agent is refused; an agent that returns registers as a new one.

    \b
    Example: bdn-admin agents rm gpu-17 --cluster east
    """
    async with reachable_mirror(output) as client:
        removed = await client.remove_agent(node, cluster)
    output.result(removed, [f"{removed.cluster}/{removed.node} removed"])


def _agent_lines(agent: AgentDocument) -> list[str]:
    life = f"{'alive' if agent.alive else 'silent'} since {agent.last_heartbeat:%Y-%m-%d %H:%M:%S}Z"
    lines = [f"{agent.cluster}/{agent.node}  {life}  {counted(agent.manifests, 'manifest')}"]
    for tier, use in agent.tiers.items():
        problem = f"; takes nothing new: {use.problem}" if use.problem else ""
        lines.append(
            f"  {tier}: {format_size(use.committed)} held, {format_size(use.reserved)} being filled, "
            f"{format_size(use.leased)} in use, of {format_size(use.budget)}{problem}"
        )
    if agent.unsynced_bytes:
        lines.append(f"  checkpoints: {format_size(agent.unsynced_bytes)} not pushed yet")
    return lines
