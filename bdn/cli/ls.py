"""``bdn ls``, an alias of ``bdn-admin ls``, and ``bdn-admin agents``."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import Output, command_line, table
from bdn.core.units import counted, format_age, format_size
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifest

_SHORT: Final = 15  # characters of a digest that distinguish manifests


@click.command()
@click.option("--full", is_flag=True, help="Print whole digests, and every node.")
@command_line
async def ls(output: Output, *, full: bool) -> None:
    """List manifests and where they are cached.

    \b
    Example: bdn-admin ls
    Example: bdn-admin ls --json
    """
    async with reachable_mirror(output) as client:
        held = await client.held()
    items = sorted(held.items, key=lambda item: item.sources)
    rows = [_row(item, full=full) for item in items]
    lines = table(rows, "no manifests")
    if full:
        lines = [lines[0], *(line for item, row in zip(items, lines[1:], strict=True) for line in (row, *_nodes(item)))]
    if held.store is not None:
        use = held.store
        disk = ""
        if use.disk_free is not None and use.disk_total is not None:
            disk = f"; its disk has {format_size(use.disk_free)} free of {format_size(use.disk_total)}"
        lines.append(f"the mirror's store holds {format_size(use.bytes_stored)} of files{disk}")
    output.result(held, lines, [item.manifest for item in held.items])


def _row(item: HeldManifest, *, full: bool) -> dict[str, object]:
    used = max((holding.last_used for holding in item.nodes.values() if holding.last_used is not None), default=None)
    return {
        "source": ", ".join(item.sources),
        "manifest": item.manifest if full else f"{item.manifest[:_SHORT]}…",
        "files": item.files_total,
        "size": None if item.bytes_total is None else format_size(item.bytes_total),
        "last used": None if used is None else format_age(time.time() - used),
        "where": ", ".join(_places(item)) or None,
    }


def _places(item: HeldManifest) -> Iterator[str]:
    if item.restorable_until is not None:
        is_over = item.restorable_until < datetime.now(UTC)
        until = "the next collection" if is_over else f"{item.restorable_until:%Y-%m-%d %H:%M}Z"
        yield f"evicted from the mirror, restorable until {until}"
    elif item.mirror:
        yield "mirror"
    holdings = item.nodes.values()
    if whole := sum(holding.complete for holding in holdings):
        yield counted(whole, "node")
    if partial := sum(not holding.complete for holding in holdings):
        yield f"{counted(partial, 'node')} in part"
    if users := sum(bool(holding.held_by) for holding in holdings):
        yield f"in use on {users}"


def _nodes(item: HeldManifest) -> Iterator[str]:
    for node, holding in item.nodes.items():
        pulled = [holder.removeprefix("pull:") for holder in holding.held_by if holder.startswith("pull:")]
        if pulled and not holding.bytes:
            yield f"  {node}: pulled to {', '.join(pulled)}: the files are there, not in the cache"
            continue
        state = "whole" if holding.complete else "incomplete"
        holders = f", in use by {', '.join(holding.held_by)}" if holding.held_by else ""
        chunks = f", {format_size(holding.cluster_bytes)} for its cluster" if holding.cluster_bytes else ""
        yield f"  {node}: {state}, {format_size(holding.bytes)}{chunks}{holders}"


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
    lines = table([row for agent in found.items for row in _tier_rows(agent)], "no agents")
    output.result(found, [*lines, *(line for agent in found.items for line in _problems(agent))], names)


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


def _tier_rows(agent: AgentDocument) -> Iterator[dict[str, object]]:
    state = "disputed" if agent.disputed else "alive" if agent.alive else "silent"
    for tier, use in agent.tiers.items() or [(None, None)]:
        yield {
            "agent": f"{agent.cluster}/{agent.node}",
            "state": state,
            "heartbeat": agent.last_heartbeat,
            "manifests": agent.manifests,
            "tier": tier,
            "held": use and format_size(use.committed),
            "being filled": use and format_size(use.reserved),
            "in use": use and format_size(use.leased),
            "budget": use and format_size(use.budget),
        }


def _problems(agent: AgentDocument) -> Iterator[str]:
    for tier, use in agent.tiers.items():
        if use.problem:
            yield f"{agent.cluster}/{agent.node}: the tier {tier} takes nothing new: {use.problem}"
    if agent.unsynced_bytes:
        yield f"{agent.cluster}/{agent.node}: {format_size(agent.unsynced_bytes)} of checkpoints not pushed yet"
