"""``bdn-admin gc`` and ``bdn-admin restore``: what goes out of the mirror's store for good, and what comes back before."""

from functools import partial
from typing import Final

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import DONE, FAILED, Output, command_line, waiting_for
from bdn.core.store import Kind
from bdn.core.units import format_size, parse_duration
from bdn.net.client import LONGEST_WAIT_SECONDS
from bdn.wire.operation_schema import Collection, CollectionRequest, RestorationRequest

_WORDS: Final[dict[Kind, str]] = {
    "manifests": "evicted manifests",
    "contents": "files of no manifest",
    "half_copied": "chunks of files that nobody went on with",
    "evidence": "files that came wrong",
    "chunks": "chunks that nothing names",
    "incoming": "half-written chunks",
}


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would go; change nothing.")
@click.option(
    "--grace",
    metavar="DURATION",
    help="Least age of what no eviction released and nothing names (90m, 24h, 7d); the mirror's setting otherwise.",
)
@command_line
async def gc(output: Output, *, dry_run: bool, grace: str | None) -> int:
    """Collect what no manifest names out of the mirror's store, and what was evicted and can no longer be restored.

    Safe beside mirrors that run and agents that read. The mirror does this by itself every few hours.

    \b
    Example: bdn-admin gc --dry-run
    Example: bdn-admin gc --grace 1h
    """
    request = CollectionRequest(dry_run=dry_run, grace_seconds=_seconds(grace))
    async with reachable_mirror(output) as client:
        collection = await client.collect(request)
        waiting = waiting_for(output, collection.id)
        while collection.status == "RUNNING":
            collection = await waiting.ask(partial(client.collection, collection.id, LONGEST_WAIT_SECONDS))
    output.result(collection, _lines(collection))
    return FAILED if collection.status == "FAILED" else DONE


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--grace: {error}") from None


def _lines(collection: Collection) -> list[str]:
    would = "would free" if collection.request.dry_run else "freed"
    lines = [f"{kind.count} {_WORDS[kind.kind]}, {format_size(kind.bytes)}" for kind in collection.kinds if kind.count]
    if collection.error is not None:
        lines.append(f"{collection.error.message} [{collection.error.code}]")
    return [*lines, f"{would} {format_size(collection.bytes_freed)} ({collection.id})"]


@click.command()
@click.argument("what", metavar="MANIFEST|SOURCE")
@command_line
async def restore(output: Output, *, what: str) -> None:
    """Bring back what was evicted from the mirror, moving no bytes. What is collected is gone: exit code 4.

    A source means all its revisions unless it names one.

    \b
    Example: bdn-admin restore hf://org/model@main
    Example: bdn-admin restore b3:4d2e…
    """
    request = RestorationRequest(**{"manifest" if what.startswith("b3:") else "source": what})
    async with reachable_mirror(output) as client:
        restored = await client.restore(request)
    output.result(
        restored,
        [f"restored {', '.join(item.sources) or 'unknown source'} ({item.manifest})" for item in restored.items],
    )
