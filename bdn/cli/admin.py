"""The command ``bdn-admin``: what is held where, who the agents are, bringing things there, taking them out, secrets, and tokens."""

from __future__ import annotations

from functools import partial

import click

import bdn
from bdn.cli.exit_codes import DONE, FAILED, IN_USE
from bdn.cli.gc import gc, restore
from bdn.cli.output import Output, check_usage, command_line
from bdn.cli.prefetch import prefetch
from bdn.cli.reaching import reachable_mirror
from bdn.cli.secrets import secrets
from bdn.cli.tokens import tokens
from bdn.cli.verify import verify
from bdn.cli.waiting import waiting_for
from bdn.cli.why import why
from bdn.core.errors import InvalidRequestError
from bdn.core.units import format_size, parse_size
from bdn.net.client.mirror_client import LONGEST_WAIT_SECONDS
from bdn.wire.agent_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifest
from bdn.wire.operation_schema import EvictedItem, Eviction, EvictionRequest, Tier


@click.group()
@click.version_option(bdn.__version__, prog_name="bdn-admin")
def main() -> None:
    """Look into a BDN, bring things to its nodes and take them out of it.

    The mirror is found by BDN_URL and BDN_TOKEN; an operator acts for the organisation in BDN_ORGANISATION. Where BDN_URL is not set and no service runs, the commands work on what
    'bdn pull' has left on this machine.
    """


main.add_command(prefetch)
main.add_command(gc)
main.add_command(restore)
main.add_command(secrets)
main.add_command(tokens)
main.add_command(verify)
main.add_command(why)


@main.command()
@click.option(
    "--source", metavar="URI", help="What was mirrored from this source, all its revisions unless it names one."
)
@click.option("--manifest", metavar="DIGEST", help="One manifest, as b3:<64 hex>.")
@click.option("--job", metavar="ID", help="What a job staged.")
@click.option("--lru", metavar="BYTES", help="Least recently used manifests, until so much is free (500GB, 64MiB).")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--tier", type=click.Choice(["node", "cluster", "mirror"]), help="Only this tier.")
@click.option("--cluster", metavar="NAME", help="Only agents of this cluster.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option("--dry-run", is_flag=True, help="Show what would go; change nothing.")
@click.option("--force", is_flag=True, help="Evict what is in use, too. Jobs that use it lose their files.")
@command_line
async def evict(
    output: Output,
    *,
    source: str | None,
    manifest: str | None,
    job: str | None,
    lru: str | None,
    everything: bool,
    tier: Tier | None,
    cluster: str | None,
    node: str | None,
    dry_run: bool,
    force: bool,
) -> int:
    """Evict from caches and from the mirror's store. What is in use is refused (exit 3) unless forced.

    \b
    Example: bdn-admin evict --source hf://org/model --dry-run
    Example: bdn-admin evict --lru 500GB --node gpu-17
    """
    request = EvictionRequest(
        source=source,
        manifest=manifest,
        job=job,
        lru_bytes=_size(lru),
        all=everything,
        tier=tier,
        cluster=cluster,
        node=node,
        dry_run=dry_run,
        force=force,
    )
    check_usage(request)
    async with reachable_mirror(output) as client:
        eviction = await client.evict(request, LONGEST_WAIT_SECONDS)
        waiting = waiting_for(output, eviction.id)
        while eviction.status == "RUNNING":
            eviction = await waiting.ask(partial(client.eviction, eviction.id, LONGEST_WAIT_SECONDS))
    output.result(eviction, _eviction_lines(eviction))
    return {"DONE": DONE, "REFUSED": IN_USE}.get(eviction.status, FAILED)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidRequestError(f"--lru: {error}") from error


def _eviction_lines(eviction: Eviction) -> list[str]:
    would = "would free" if eviction.request.dry_run else "freed"
    lines = [_item_line(item, dry_run=eviction.request.dry_run) for item in eviction.items]
    lines += [f"no answer from {agent}" for agent in eviction.unreachable]
    if eviction.error is not None:
        lines.append(f"{eviction.error.message} [{eviction.error.code}]")
    return [*lines, f"{would} {format_size(eviction.bytes_freed)} ({eviction.id})"]


def _item_line(item: EvictedItem, *, dry_run: bool) -> str:
    where = item.tier if item.node is None else f"{item.tier} {item.cluster}/{item.node}"
    name = ", ".join(item.sources) or "unknown source"
    holders = f", in use by {', '.join(item.holders)}" if item.holders else ""
    verb = "refused" if item.refused else ("would evict" if dry_run else "evicted")
    until = f", restorable until {item.restorable_until:%Y-%m-%d %H:%M}Z" if item.restorable_until else ""
    return f"{verb} {where}: {name} ({item.manifest[:15]}…), {format_size(item.bytes)}{until}{holders}"


@main.command()
@command_line
async def ls(output: Output) -> None:
    """List what is held where.

    \b
    Example: bdn-admin ls --json
    """
    async with reachable_mirror(output) as client:
        held = await client.held()
    output.result(held, [line for item in held.items for line in _held_lines(item)] or ["nothing is held"])


def _held_lines(item: HeldManifest) -> list[str]:
    size = "" if item.bytes_total is None else f", {item.files_total} files, {format_size(item.bytes_total)}"
    lines = [f"{', '.join(item.sources)}  {item.manifest}{size}{', on the mirror' if item.mirror else ''}"]
    for node, holding in item.nodes.items():
        state = "whole" if holding.complete else "incomplete"
        holders = f", in use by {', '.join(holding.held_by)}" if holding.held_by else ""
        chunks = f", {format_size(holding.cluster_bytes)} for its cluster" if holding.cluster_bytes else ""
        lines.append(f"  {node}: {state}, {format_size(holding.bytes)}{chunks}{holders}")
    return lines


@main.command()
@command_line
async def agents(output: Output) -> None:
    """List the agents, their space and when they were heard of.

    \b
    Example: bdn-admin agents
    """
    async with reachable_mirror(output) as client:
        found = await client.agents()
    output.result(found, [line for agent in found.items for line in _agent_lines(agent)] or ["no agent was heard of"])


def _agent_lines(agent: AgentDocument) -> list[str]:
    life = f"{'alive' if agent.alive else 'silent'} since {agent.last_heartbeat:%Y-%m-%d %H:%M:%S}Z"
    lines = [f"{agent.cluster}/{agent.node}  {life}  {agent.manifests} manifests"]
    for tier, use in agent.tiers.items():
        problem = f"; takes nothing new: {use.problem}" if use.problem else ""
        lines.append(
            f"  {tier}: {format_size(use.committed)} held, {format_size(use.reserved)} being filled, "
            f"{format_size(use.leased)} in use, of {format_size(use.budget)}{problem}"
        )
    return lines
