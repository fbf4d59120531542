"""``bdn pull``: the whole path on this machine, embedded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import BaseModel

from bdn.cli.clients import request_body
from bdn.cli.output import Output, command_line, progress_bar
from bdn.cli.stage import grant_of, stage_bytes
from bdn.core.errors import CanceledError
from bdn.core.units import format_size
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import BytesFrom, StageDocument

if TYPE_CHECKING:
    from bdn.cli.running import Services


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
async def pull(
    output: Output, *, source: str, dest: Path, allow: tuple[str, ...], ignore: tuple[str, ...], secret: str | None
) -> None:
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

    body = request_body((source,), (), allow, ignore, secret)
    async with embedded_services(output, "bdn pull") as services:
        for wanted in body.sources():
            await asyncio.to_thread(prepare, wanted.source.scheme)
        spare_collector()
        began = time.perf_counter()
        await services.agent.check_destination(dest)
        mirror = await _mirror(output, services, body)
        stage = await _stage(output, services, mirror, dest)
        pulled = _pulled(mirror, stage, time.perf_counter() - began)
    for warning in pulled.warnings:
        output.warn(warning)
    output.result(pulled, [_line(pulled)])


async def _mirror(output: Output, services: Services, body: MirrorRequestBody) -> Mirror:
    requests = services.mirror.service.requests
    mirror = await requests.request(body.sources(), DEFAULT_ORGANISATION)
    with progress_bar(output, "mirroring") as bar:
        async for latest in requests.follow(mirror.id, DEFAULT_ORGANISATION, 0.2):
            mirror = latest
            bar.update(mirror.bytes_transferred + mirror.bytes_reused, mirror.bytes_total)
    if mirror.error is not None:
        raise ReportedError(mirror.error)
    return mirror


async def _stage(output: Output, services: Services, mirror: Mirror, dest: Path) -> StageDocument:
    stage: StageDocument | None = None
    with progress_bar(output, "staging") as bar:
        async for stage in services.agent.pull(grant_of(mirror), dest):
            bar.update(sum(mount.bytes_done for mount in stage.mounts), stage_bytes(stage))
    if stage is None or stage.state != "READY":
        raise ReportedError(stage.error) if stage and stage.error else CanceledError("the pull")
    return stage


def _pulled(mirror: Mirror, stage: StageDocument, seconds: float) -> Pulled:
    source, mount = mirror.sources[0], stage.mounts[0]
    return Pulled(
        source=source.source,
        destination=mount.path,
        resolved_revision=source.resolved_revision,
        manifest=mount.manifest,
        files_total=mount.files_total or 0,
        bytes_total=mount.bytes_total or 0,
        bytes_transferred=source.bytes_transferred,
        bytes_from=mount.bytes_from,
        view=mount.view,
        warnings=source.warnings,
        seconds=round(seconds, 4),
    )


def _line(pulled: Pulled) -> str:
    return (
        f"{pulled.destination}: {pulled.files_total} files, {format_size(pulled.bytes_total)}, ready in "
        f"{pulled.seconds:.2f} s ({format_size(pulled.bytes_transferred)} from the upstream, "
        f"{format_size(pulled.bytes_from.mirror)} from the mirror, {format_size(pulled.bytes_from.node)} held already)"
    )
