"""``bdn-admin store``: operations on a mirror's whole store."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from typing import Final

import click

from bdn.cli.output import DONE, FAILED, Output, command_line, progress_bar
from bdn.core.errors import InvalidRequestError
from bdn.core.store import MirrorStore
from bdn.core.units import counted, format_size
from bdn.mirror.chunks.opening import opened_store
from bdn.mirror.settings import MirrorSettings
from bdn.store.copying import CopyReport, StoreCopy

_LISTED: Final = 500  # wrong chunks, at most; as in a verification


@click.group()
def store() -> None:
    """Copy the mirror's store, or change the database that owns it."""


@store.command()
@command_line
async def adopt(output: Output) -> None:
    """Make the mirror's database the owner of BDN_STORE, which belongs to another database.

    For a store whose database is lost. Run it with the mirror's settings. Two databases on one store delete each other's chunks: stop
    every mirror of the other database first. Objects without a record in this database stay until 'bdn-admin gc --orphans' deletes them.

    \b
    Example: bdn-admin store adopt
    """
    from bdn.mirror.app import adopt_store  # noqa: PLC0415 - imports a whole mirror, which 'store copy' does not need

    settings = MirrorSettings()
    before, owner = await adopt_store(settings)
    said = (
        "belongs to this database already"
        if before == owner
        else f"belongs to this database now (before: {before or 'none'})"
    )
    document = {"store": settings.effective_store, "before": before, "owner": owner}
    output.result(document, [f"{settings.effective_store} {said}"])


@store.command()
@click.option(
    "--to",
    required=True,
    metavar="URL",
    help="The other store: file:///path, s3://bucket/prefix, gs://bucket/prefix, r2://account.bucket/prefix.",
)
@click.option("--to-secret", metavar="NAME", help="Its BDN_STORE_SECRET: the name of the secret with its keys.")
@click.option("--to-endpoint", metavar="URL", help="Its BDN_STORE_ENDPOINT.")
@click.option("--to-region", metavar="NAME", help="Its BDN_STORE_REGION.")
@click.option("--dry-run", is_flag=True, help="Print what would be copied; copy nothing.")
@command_line
async def copy(
    output: Output, *, to: str, to_secret: str | None, to_endpoint: str | None, to_region: str | None, dry_run: bool
) -> int:
    """Copy the chunks of BDN_STORE that another store lacks, beside running mirrors.

    Run it with the mirror's settings, on a machine that reaches both stores. Copy while the mirror runs; stop the mirror; copy again,
    for chunks written meanwhile; start the mirror with the other store as BDN_STORE. An interrupted copy resumes. Exit code 0: the
    other store lacks nothing.

    \b
    Example: bdn-admin store copy --to s3://weights/bdn --to-secret store --dry-run
    """
    ours = MirrorSettings()
    theirs = MirrorSettings(store=to, store_secret=to_secret, store_endpoint=to_endpoint, store_region=to_region)
    if _place(ours) == _place(theirs):
        raise InvalidRequestError(
            f"{to} is the store to copy from: set BDN_STORE to the old store, and name the new one with --to"
        )
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(opened_store(ours, exclusive=False))
        target = await stack.enter_async_context(opened_store(theirs, exclusive=False))
        await _check_owners(source, target, to)
        report = await StoreCopy(source, target, partial(progress_bar, output, "copying")).run(dry_run=dry_run)
    listed = report.listed
    if not listed.chunks:
        raise InvalidRequestError(
            f"{ours.effective_store} holds no chunk: set BDN_STORE, or BDN_DATA_DIR, as the mirror has it"
        )
    if listed.target_only:
        output.warn(
            f"{to} holds {counted(listed.target_only, 'chunk')} that {ours.effective_store} does not. If they are another mirror's, copy to "
            "another place: mirrors on one store delete each other's chunks"
        )
    output.result(_document(ours, to, report), _lines(to, report, dry_run=dry_run))
    return FAILED if listed.missing_chunks and not dry_run else DONE


async def _check_owners(source: MirrorStore, target: MirrorStore, to: str) -> None:
    """The owner is not copied: the first database that starts on the copy becomes its owner."""
    ours, theirs = await asyncio.to_thread(source.owner), await asyncio.to_thread(target.owner)
    if theirs not in (None, ours):
        raise InvalidRequestError(
            f"{to} belongs to another mirror database (its owner is {theirs}), whose collections would delete copied chunks: copy to another place"
        )


def _place(settings: MirrorSettings) -> tuple[str, str | None]:
    return settings.effective_store.rstrip("/"), settings.store_endpoint


def _document(ours: MirrorSettings, to: str, report: CopyReport) -> dict[str, object]:
    listed = report.listed
    return {
        "source": ours.effective_store,
        "target": to,
        "chunks_total": listed.chunks,
        "bytes_total": listed.bytes,
        "chunks_copied": report.chunks,
        "bytes_copied": report.bytes,
        "chunks_missing": listed.missing_chunks,
        "bytes_missing": listed.missing_bytes,
        "chunks_target_only": listed.target_only,
        "chunks_wrong": len(report.wrong),
        "wrong": [{"chunk": str(digest), "reason": reason} for digest, reason in islice(report.wrong.items(), _LISTED)],
    }


def _lines(to: str, report: CopyReport, *, dry_run: bool) -> list[str]:
    listed = report.listed
    missing = f"{counted(listed.missing_chunks, 'chunk')}, {format_size(listed.missing_bytes)}"
    held = f"of {counted(listed.chunks, 'chunk')}, {format_size(listed.bytes)}"
    if dry_run:
        return [f"would copy {missing}, {held}"]
    lines = [f"wrong, not copied: {digest}: {reason}" for digest, reason in islice(report.wrong.items(), _LISTED)]
    lines.append(f"copied {counted(report.chunks, 'chunk')}, {format_size(report.bytes)}")
    if not listed.missing_chunks:
        return [*lines, f"{to} lacks nothing {held}"]
    why = (
        "'bdn-admin verify' repairs what is wrong" if report.wrong else "the mirror still writes to the store: stop it"
    )
    return [*lines, f"{to} still lacks {missing}, {held}: {why}; then copy again"]
