"""``bdn-admin evict``, ``gc``, ``restore``, ``prefetch``, ``verify``: operations of the mirror, and their outcome."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import click

from bdn.cli.clients import reachable_agent, reachable_mirror
from bdn.cli.output import DONE, FAILED, IN_USE, Output, check_usage, command_line, parsed, progress_bar, waiting_for
from bdn.core.store import Kind
from bdn.core.units import counted, format_size, parse_duration, parse_size
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS
from bdn.wire.operation_schema import (
    CollectedKind,
    Collection,
    CollectionRequest,
    DamagedItem,
    EvictedItem,
    Eviction,
    EvictionRequest,
    PathVerification,
    PathVerificationRequest,
    Prefetch,
    PrefetchNode,
    PrefetchRequest,
    RestorationRequest,
    Verification,
    VerificationRequest,
)
from bdn.wire.shapes import ErrorBody

_PREFETCH_SECONDS: Final = 2.0  # interval of agents' progress reports
_COLLECTED: Final[dict[Kind, str]] = {
    "manifests": "evicted manifests",
    "chunks": "unreferenced chunks",
    "evidence": "quarantined files",
    "incoming": "half-written chunks",
}
_Operation = TypeVar("_Operation", Eviction, Collection, Verification)


async def _ended(output: Output, found: _Operation, look: Callable[[str, float], Awaitable[_Operation]]) -> _Operation:
    waiting = waiting_for(output, found.id)
    while found.status == "RUNNING":
        found = await waiting.ask(partial(look, found.id, LONGEST_WAIT_SECONDS))
    return found


def _error_lines(error: ErrorBody | None) -> list[str]:
    return [] if error is None else [f"{error.message} [{error.code}]"]


def _where(item: EvictedItem | DamagedItem) -> str:
    return item.tier if item.node is None else f"{item.tier} {item.cluster}/{item.node}"


# --- evict ---


@click.command()
@click.argument("what", metavar="[SOURCE|MANIFEST]", required=False)
@click.option("--job", metavar="ID", help="Every manifest that this job staged.")
@click.option(
    "--lru",
    "lru_bytes",
    metavar="BYTES",
    callback=parsed(parse_size),
    help="Least recently used manifests, until this much is free (500GB, 64MiB).",
)
@click.option("--all", is_flag=True, help="Every manifest.")
@click.option("--tier", type=click.Choice(["node", "cluster", "mirror"]), help="Only this tier.")
@click.option("--cluster", metavar="NAME", help="Only agents of this cluster.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option("--dry-run", is_flag=True, help="Print what would be evicted; change nothing.")
@click.option("--force", is_flag=True, help="Evict manifests in use, too. Their jobs lose the files.")
@click.option("--plan", metavar="ID", help="With --force: refuse what jobs use that this --dry-run did not name.")
@click.option("--purge", is_flag=True, help="The mirror frees its disk now; evictions cannot be restored.")
@command_line
async def evict(output: Output, *, what: str | None, **options: object) -> int:
    """Evict manifests from caches and from the mirror's store. Manifests in use are refused (exit 3) unless forced.

    A source selects all its revisions unless it names one. Caches free their disks now. The mirror keeps evicted manifests for
    seven days (BDN_TOMBSTONE_SECONDS), in which 'bdn-admin restore' restores them. --purge frees the mirror's disk now, also of
    earlier evictions. The mirror evicts checkpoints only by their bt:// source or their manifest: they have no upstream.

    \b
    Example: bdn-admin evict hf://org/model --dry-run
    Example: bdn-admin evict hf://org/model --force --plan evi_0123456789abcdef01234567
    Example: bdn-admin evict --lru 500GB --node gpu-17
    """
    selected = {} if what is None else {_kind(what): what}
    request = EvictionRequest.model_validate({**options, **selected})
    check_usage(request.check)
    async with reachable_mirror(output) as client:
        eviction = await client.evict(request, LONGEST_WAIT_SECONDS)
        eviction = await _ended(output, eviction, client.eviction)
    output.result(eviction, _eviction_lines(eviction))
    return {"DONE": DONE, "REFUSED": IN_USE}.get(eviction.status, FAILED)


def _eviction_lines(eviction: Eviction) -> list[str]:
    would = "would free" if eviction.request.dry_run else "freed"
    freed = f"{would} {format_size(eviction.bytes_freed - eviction.bytes_kept)}"
    if eviction.bytes_kept:
        freed += (
            f" now; the mirror keeps {format_size(eviction.bytes_kept)} on its disk until {eviction.kept_until:%Y-%m-%d %H:%M}Z, "
            "and they can be restored so long (--purge frees them at once)"
        )
    return [
        *(_evicted_line(item, dry_run=eviction.request.dry_run) for item in eviction.items),
        *(f"no answer from {agent}" for agent in eviction.unreachable),
        *_skipped_lines(eviction),
        *_error_lines(eviction.error),
        f"{freed} ({eviction.id})",
    ]


def _skipped_lines(eviction: Eviction) -> list[str]:
    if not eviction.skipped_pushed:
        return []
    size = format_size(eviction.skipped_pushed_bytes)
    skipped = f"skipped {eviction.skipped_pushed} pushed checkpoints, {size}: they have no upstream"
    return [f"{skipped}; to evict one, name its source, bt://project@job/checkpoint, or its manifest"]


def _evicted_line(item: EvictedItem, *, dry_run: bool) -> str:
    name = ", ".join(item.sources) or "unknown source"
    holders = f", in use by {', '.join(item.holders)}" if item.holders else ""
    verb = "refused" if item.refused else ("would evict" if dry_run else "evicted")
    until = f", restorable until {item.restorable_until:%Y-%m-%d %H:%M}Z" if item.restorable_until else ""
    return f"{verb} {_where(item)}: {name} ({item.manifest[:15]}…), {format_size(item.bytes)}{until}{holders}"


# --- gc and restore ---


@click.command()
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; change nothing.")
@click.option(
    "--grace",
    "grace_seconds",
    metavar="DURATION",
    callback=parsed(parse_duration),
    help="Delete chunks unreferenced for at least this long (90m, 24h, 7d); default: the mirror's setting.",
)
@click.option("--orphans", is_flag=True, help="Only objects without a database record, and partial writes.")
@command_line
async def gc(output: Output, *, dry_run: bool, grace_seconds: int | None, orphans: bool) -> int:
    """Delete unreferenced chunks from the mirror's store, and evicted manifests that can no longer be restored.

    Safe beside running mirrors and reading agents. The mirror collects by itself every few hours. --orphans lists the store and
    deletes objects without a database record. Orphans remain after a power loss that takes the database's last commits, or after
    a database was restored from a backup.

    \b
    Example: bdn-admin gc --dry-run
    Example: bdn-admin gc --orphans --dry-run
    """
    request = CollectionRequest(dry_run=dry_run, grace_seconds=grace_seconds, orphans=orphans)
    async with reachable_mirror(output) as client:
        collection = await client.collect(request)
        collection = await _ended(output, collection, client.collection)
    would = "would free" if dry_run else "freed"
    lines = [*map(_collected_line, filter(lambda one: one.count, collection.kinds)), *_error_lines(collection.error)]
    output.result(collection, [*lines, f"{would} {format_size(collection.bytes_freed)} ({collection.id})"])
    return FAILED if collection.status == "FAILED" else DONE


def _collected_line(one: CollectedKind) -> str:
    """Manifests and evidence have no bytes of their own: their bytes are in chunks."""
    line = f"{one.count} {_COLLECTED[one.kind]}"
    return f"{line}, {format_size(one.bytes)}" if one.kind in ("chunks", "incoming") else line


@click.command()
@click.argument("what", metavar="MANIFEST|SOURCE")
@command_line
async def restore(output: Output, *, what: str) -> None:
    """Restore evicted manifests on the mirror, without a transfer. Exit code 4 if their chunks were deleted already.

    A source selects all its revisions unless it names one.

    \b
    Example: bdn-admin restore hf://org/model@main
    Example: bdn-admin restore b3:4d2e…
    """
    async with reachable_mirror(output) as client:
        restored = await client.restore(RestorationRequest(**{_kind(what): what}))
    output.result(
        restored,
        [f"restored {', '.join(item.sources) or 'unknown source'} ({item.manifest})" for item in restored.items],
    )


def _kind(what: str) -> str:
    return "manifest" if what.startswith("b3:") else "source"


# --- prefetch ---


@click.command()
@click.argument("what", metavar="SOURCE|MIRROR_ID|MANIFEST")
@click.option("--cluster", metavar="NAME", help="The live nodes of this cluster; --node narrows the choice.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="This node; may be repeated.")
@click.option("--wait", is_flag=True, help="Wait until every node has the files or has failed.")
@command_line
async def prefetch(output: Output, *, what: str, cluster: str | None, nodes: tuple[str, ...], wait: bool) -> int:
    """Fill node caches from the mirror before a job needs the files. Caches may evict prefetched files like any others.

    A source selects its last mirrored manifest; without a revision, the manifest of the default revision, or else the newest.
    Exit code 1 if a node failed or is unreachable, 4 if the mirror knows no such manifest or node.

    \b
    Example: bdn-admin prefetch hf://org/model --cluster gpu --wait
    Example: bdn-admin prefetch mir_0123456789abcdef01234567 --node gpu-17 --node gpu-18
    """
    kind = "mirror_id" if what.startswith("mir_") else _kind(what)
    request = PrefetchRequest(**{kind: what}, cluster=cluster, nodes=list(nodes))
    check_usage(request.check)
    async with reachable_mirror(output) as client:
        found = await client.prefetch(request)
        if wait:
            waiting = waiting_for(output, found.id)
            seconds = _PREFETCH_SECONDS if output.wants_bars else LONGEST_WAIT_SECONDS
            with progress_bar(output, "prefetching") as show:
                while found.status == "RUNNING":
                    found = await waiting.ask(partial(client.prefetch_by_id, found.id, seconds))
                    moved = sum(node.bytes_from.cluster + node.bytes_from.mirror for node in found.nodes)
                    show(sum(node.bytes_from.total for node in found.nodes), _bytes_total(found), moved)
    output.result(found, [*map(_node_line, found.nodes), f"{found.status} ({found.id})"])
    return FAILED if found.status == "FAILED" else DONE


def _bytes_total(found: Prefetch) -> int | None:
    """None until every node knows its part."""
    sizes = [node.bytes_total for node in found.nodes if node.state not in {"FAILED", "UNREACHABLE"}]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _node_line(node: PrefetchNode) -> str:
    came = node.bytes_from
    sizes = f"{format_size(came.node)} were there, {format_size(came.cluster)} from peers, {format_size(came.mirror)} from the mirror"
    return ": ".join([f"{node.cluster}/{node.node}  {node.state}  {sizes}", *_error_lines(node.error)])


# --- verify ---


@click.command()
@click.argument("what", metavar="[PATH|MANIFEST|SOURCE]", required=False)
@click.option("--all", is_flag=True, help="Every manifest.")
@click.option("--tier", type=click.Choice(["node", "cluster", "mirror"]), help="Only this tier.")
@click.option("--cluster", metavar="NAME", help="Only agents of this cluster.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option(
    "--no-repair", is_flag=True, help="Report only. Corrupt chunks of the mirror's store are quarantined all the same."
)
@command_line
async def verify(output: Output, *, what: str | None, no_repair: bool, **options: object) -> int:
    """Verify stored chunks and cached files, and repair corrupt ones from agents, the mirror or the upstream.

    This machine's agent verifies a path, a file or folder of a stage. The mirror and all agents verify a manifest (b3:…), a
    source, or --all. Exit code 0 if nothing is corrupt or everything was repaired, 1 if damage remains, 4 if nothing matches.

    \b
    Example: bdn-admin verify hf://org/model
    Example: bdn-admin verify --all --tier mirror --no-repair
    Example: bdn-admin verify /mnt/models/llama/model-00001.safetensors
    """
    if what is not None and is_path(what):
        if any(options.values()):
            raise click.UsageError(
                "this machine's agent verifies a path: leave out --all, --tier, --cluster and --node"
            )
        return await _verify_path(output, what, repair=not no_repair)
    selected = {} if what is None else {_kind(what): what}
    request = VerificationRequest.model_validate({**options, **selected, "repair": not no_repair})
    check_usage(request.check)
    async with reachable_mirror(output) as client:
        found = await client.verify(request)
        output.say(f"verifying ({found.id})")
        found = await _ended(output, found, lambda name, _: client.verification(name))
    output.result(found, _damage_lines(found, [f"no answer from {agent}" for agent in found.unreachable]))
    return DONE if found.status == "DONE" else FAILED


def is_path(what: str) -> bool:
    """A source has a scheme and a manifest a prefix; a text that begins like a path or exists is a path."""
    return what.startswith(("/", ".")) or (":" not in what and Path(what).exists())


async def _verify_path(output: Output, what: str, *, repair: bool) -> int:
    # Unresolved links: the job's view may be behind a link, and the agent knows its own paths.
    path = str(Path(what).absolute())  # noqa: ASYNC240 - no disk access
    async with reachable_agent(output) as client:
        report = await client.verify(PathVerificationRequest(path=path, repair=repair))
    output.result(report, _damage_lines(report, []))
    is_left = any(item.outcome != "repaired" for item in report.items)
    return FAILED if report.error is not None or is_left else DONE


def _damage_lines(found: Verification | PathVerification, remarks: Sequence[str]) -> list[str]:
    repaired = sum(item.outcome == "repaired" for item in found.items)
    left = len(found.items) - repaired
    total = f"read {counted(found.chunks_read, 'chunk')}, {format_size(found.bytes_read)}: {repaired} repaired, {left} damaged ({found.id})"
    return [*map(_damaged_line, found.items), *remarks, *_error_lines(found.error), total]


def _damaged_line(item: DamagedItem) -> str:
    names = ", ".join(item.sources) or (f"{item.manifest[:15]}…" if item.manifest else "")
    what = " of ".join(part for part in (item.path, names) if part)
    return f"{item.outcome} {_where(item)}: {item.chunk}{f' in {what}' if what else ''}: {item.reason}"
