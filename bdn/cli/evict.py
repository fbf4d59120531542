"""``bdn-admin evict``: take things out of caches and out of the mirror's store."""

from functools import partial

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import DONE, FAILED, IN_USE, Output, check_usage, command_line, waiting_for
from bdn.core.errors import InvalidRequestError
from bdn.core.units import format_size, parse_size
from bdn.net.client import LONGEST_WAIT_SECONDS
from bdn.wire.operation_schema import EvictedItem, Eviction, EvictionRequest, Tier


@click.command()
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
