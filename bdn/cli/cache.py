"""``bdn-admin cache``: the training caches of projects, their contents, and their limits."""

import csv
import io
from collections.abc import Sequence
from typing import Final

import click

from bdn.cli.clients import agent_client, mirror_client
from bdn.cli.output import Output, command_line, fields_of, parsed, table
from bdn.core.errors import NotFoundError
from bdn.core.printable import printable
from bdn.core.units import counted, format_size, format_time, parse_size
from bdn.net.api_clients import MirrorClient
from bdn.wire.cache_schema import (
    CacheLimit,
    CacheRemoval,
    FileSummary,
    ProjectCache,
    RemovalRequest,
    SummaryRequest,
    TrainingCacheDirectory,
)

_COLUMNS: Final = ("path", "size_bytes", "modified", "file_type", "permissions")


@click.group()
def cache() -> None:
    """List, measure and trim the training caches of projects."""


async def _found(client: MirrorClient, project: str) -> ProjectCache:
    """Match by name, then by id. Raises ``NotFoundError``."""
    items = (await client.caches()).items
    of_name = [one for one in items if one.project_name == project]
    for one in (*of_name, *(one for one in items if one.project_id == project)):
        return one
    raise NotFoundError(f"a training cache of project {project}")


@cache.command()
@command_line
async def ls(output: Output) -> None:
    """List the training caches of projects, including deleted projects whose cache no agent has removed yet.

    A project is pinned to one cluster, and may have a separate cache in other clusters.

    \b
    Example: bdn-admin cache ls
    """
    async with mirror_client() as client:
        found = await client.caches()
    lines = table([_row(one, at) for one in found.items for at in one.directories], "no training caches")
    output.result(found, [*lines, *map(_removal_line, found.removals)], [one.project_id for one in found.items])


def _row(one: ProjectCache, directory: TrainingCacheDirectory) -> dict[str, object]:
    return {
        "project": one.project_name,
        "id": one.project_id,
        "cluster": directory.cluster + (" (pinned)" if directory.cluster == one.cluster else ""),
        "size": "not measured yet" if directory.size_bytes is None else format_size(directory.size_bytes),
        "limit": format_size(one.limit_bytes),
        "files": directory.files,
        "measured": directory.captured_at,
    }


def _removal_line(one: CacheRemoval) -> str:
    why = "" if one.error is None else f": {one.error.message} [{one.error.code}]"
    return f"{one.project_id} was deleted {format_time(one.asked_at.timestamp())}, its cache in {one.cluster} is {one.state}{why}"


@cache.command()
@click.argument("project")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values with a header line.")
@command_line
async def summarize(output: Output, *, project: str, as_csv: bool) -> None:
    """Measure a project's cache now, on this node, and list what it holds.

    A node of the project's cluster measures the cache every ten minutes while jobs use it, and once after the last job. Beyond
    100,000 files, the list has folders with their total size.

    \b
    Example: bdn-admin cache summarize llama
    Example: bdn-admin cache summarize llama --csv
    """
    async with mirror_client() as client, agent_client() as agent:
        found = await _found(client, project)
        summary = await agent.summarize_cache(SummaryRequest(project=found.project_id))
    files = summary.file_summaries
    if as_csv:
        output.result(summary, _csv(files).splitlines())
        return
    size = sum(one.size_bytes for one in files)
    total = f"{counted(len(files), 'entry') if len(files) == 1 else f'{len(files)} entries'}, {format_size(size)}"
    output.result(
        summary,
        [*table([fields_of(one, "permissions size_bytes modified path") for one in files]), total],
        [one.path for one in files],
    )


def _csv(files: Sequence[FileSummary]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in files:
        writer.writerow([printable(one.path), one.size_bytes, one.modified.isoformat(), one.file_type, one.permissions])
    return text.getvalue()


@cache.command()
@click.argument("project")
@click.argument("path")
@click.option("--force", is_flag=True, help="Delete even while the project is in use; its jobs lose these files.")
@command_line
async def rm(output: Output, *, project: str, path: str, force: bool) -> None:
    """Delete PATH below a project's cache, as 'summarize' lists it.

    Refused (exit 3) while a job on any node has the cache mounted, or an upload to the project is running.

    The path disappears at once; the agent frees its space in the background.

    \b
    Example: bdn-admin cache rm llama user_artifacts/tokenized-v1
    """
    async with mirror_client() as client, agent_client() as agent:
        found = await _found(client, project)
        removed = await agent.remove_from_cache(RemovalRequest(project=found.project_id, path=path, force=force))
    output.result(removed, [f"removed {removed.path}"], [removed.path])


@cache.command("set")
@click.argument("project")
@click.option(
    "--bytes",
    "limit_bytes",
    metavar="SIZE",
    required=True,
    callback=parsed(parse_size),
    help="The limit (2TB). A project above it cannot start another job with a cache.",
)
@command_line
async def set_limit(output: Output, *, project: str, limit_bytes: int) -> None:
    """Set the size limit of a project's cache, instead of BDN_CACHE_BYTES.

    \b
    Example: bdn-admin cache set llama --bytes 2TB
    """
    async with mirror_client() as client:
        changed = await client.limit_cache(project, CacheLimit(limit_bytes=limit_bytes))
    output.result(
        changed, [f"{changed.project_name} may hold {format_size(changed.limit_bytes)}"], [changed.project_id]
    )


@cache.command()
@click.argument("project")
@click.option("--cluster", metavar="NAME", required=True, help="The cluster that lost the volume.")
@command_line
async def forget(output: Output, *, project: str, cluster: str) -> None:
    """Forget which volume of a cluster holds a project's cache; the next job creates a cache on the volume of its node.

    For lost or replaced volumes. Files on a volume that returns are not deleted.

    \b
    Example: bdn-admin cache forget llama --cluster east
    """
    async with mirror_client() as client:
        changed = await client.forget_cache_volume(project, cluster)
    output.result(
        changed, [f"{changed.project_name} begins a new cache in {cluster} with its next job"], [changed.project_id]
    )
