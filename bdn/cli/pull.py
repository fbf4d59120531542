"""``bdn pull``: the whole path on this machine, embedded."""

import asyncio
import time
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from bdn.cli.clients import request_body
from bdn.cli.output import Output, command_line
from bdn.cli.stage import grant_of, ready_mirror, ready_stage
from bdn.core.units import format_size
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.stage_schema import BytesFrom


class Pulled(BaseModel):
    """What a pull did. ``bytes_transferred`` came from the upstream, ``bytes_from`` says where the view's bytes came from."""

    source: str
    destination: str
    resolved_revision: str | None
    manifest: str
    files_total: int
    bytes_total: int
    bytes_transferred: int
    bytes_from: BytesFrom
    view: str | None
    warnings: list[str]
    seconds: float


@click.command()
@click.argument("source")
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--allow", multiple=True, metavar="GLOB", help="Only these files; may be repeated. ** crosses folders.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option("--secret", metavar="NAME", help="The name of the secret that opens the source, as in BDN_SECRET_<NAME>.")
@command_line
async def pull(output: Output, *, source: str, dest: Path, **asked: Any) -> None:  # noqa: ANN401 - of request_body
    """Put the files of SOURCE at DEST, through a mirror and a cache on this machine.

    The files are hard links into the cache where that is possible, so that a second pull is immediate and takes no space.
    DEST must be new, empty, or from an earlier pull. Removing DEST lets the cache evict its files when it needs room.

    \b
    Example: bdn pull hf://org/model@main ./model --allow '**/*.safetensors' --allow '*.json'
    Example: bdn pull s3://bucket/data ./data --secret my_keys
    """
    # A whole mirror, which 'bdn pull --help' must not wait for.
    from bdn.cli.running import embedded_services, spare_collector  # noqa: PLC0415
    from bdn.sources.opener import prepare  # noqa: PLC0415

    sources = request_body((source,), **asked).sources()
    async with embedded_services(output, "bdn pull") as (running, agent):
        for wanted in sources:
            await asyncio.to_thread(prepare, wanted.source.scheme)
        spare_collector()
        began = time.perf_counter()
        await agent.check_destination(dest)
        requests = running.service.requests
        begun = await requests.request(sources, DEFAULT_ORGANISATION)
        mirror = await ready_mirror(output, "mirroring", requests.follow(begun.id, DEFAULT_ORGANISATION, 0.2))
        stage = await ready_stage(output, "staging", agent.pull(grant_of(mirror), dest))
        seconds = time.perf_counter() - began
    mirrored, mount = mirror.sources[0], stage.mounts[0]
    pulled = Pulled(
        source=mirrored.source,
        destination=mount.path,
        resolved_revision=mirrored.resolved_revision,
        manifest=mount.manifest,
        files_total=mount.files_total or 0,
        bytes_total=mount.bytes_total or 0,
        bytes_transferred=mirrored.bytes_transferred,
        bytes_from=mount.bytes_from,
        view=mount.view,
        warnings=mirrored.warnings,
        seconds=round(seconds, 4),
    )
    for warning in pulled.warnings:
        output.warn(warning)
    output.result(pulled, [_line(pulled)])


def _line(pulled: Pulled) -> str:
    return (
        f"{pulled.destination}: {pulled.files_total} files, {format_size(pulled.bytes_total)}, ready in "
        f"{pulled.seconds:.2f} s ({format_size(pulled.bytes_transferred)} from the upstream, "
        f"{format_size(pulled.bytes_from.mirror)} from the mirror, {format_size(pulled.bytes_from.node)} held already)"
    )
