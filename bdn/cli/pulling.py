"""What ``bdn pull`` does: the whole path on this machine, embedded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from bdn.cli.clients import request_body
from bdn.cli.output import Output
from bdn.cli.pull_plan import AtDestination, contents_of, plan_pull
from bdn.cli.running import embedded_services, spare_collector
from bdn.cli.stage import grant_of, ready_mirror, ready_stage
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.room import Tree, check_room
from bdn.core.source.uri import WeightsSource
from bdn.core.units import counted, format_size
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.mirror_schema import MirrorSource
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import BytesFrom

if TYPE_CHECKING:
    from bdn.mirror.ingest.requests import HeldSource, MirrorRequests

_PATHS_SHOWN = 5
_HUB_IS_AWAY = ("UPSTREAM_UNAVAILABLE", "UPSTREAM_RATE_LIMITED")


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


async def run_pull(
    output: Output,
    source: str,
    dest: Path,
    *,
    offline: bool,
    replace: bool,
    link: bool,
    dry_run: bool,
    **asked: Any,  # noqa: ANN401 - of request_body
) -> None:
    """Put the files of a source at a directory, and print what was done, or with ``dry_run`` what would be."""
    (wanted,) = request_body((source,), **asked).sources()
    async with embedded_services(output, "bdn pull") as (running, agent):
        requests = running.service.requests
        began = time.perf_counter()
        held = await requests.held(wanted, DEFAULT_ORGANISATION, is_newest=offline)
        if held is None and offline:
            raise NotFoundError(
                f"{wanted.source} among what was pulled here; without --offline its upstream is asked. It"
            )
        if held is None:
            from bdn.sources.opener import prepare  # noqa: PLC0415 - a quarter of a second

            await asyncio.to_thread(prepare, wanted.source.scheme)
            began = time.perf_counter()
        spare_collector()
        await agent.check_destination(dest)
        running.service.room.beside = lambda store, tree: agent.needs(dest, store, tree)
        if dry_run:
            look = AtDestination.look(agent, requests, wanted, dest, link=link)
            planned = await plan_pull(running.service, agent, wanted, held, await look)
            output.result(planned, planned.lines())
            return
        if held is None:
            mirrored, grant = await _mirror(output, requests, wanted)
        else:
            mirrored, grant = held.source.model_copy(update={"bytes_transferred": 0}), held.grant
            if offline:
                output.say(f"offline: {_of_then(held)}")
        coming, at_dest = await agent.coming(grant), await AtDestination.look(agent, requests, wanted, dest, link=link)
        lost = at_dest.lost(contents_of(coming))
        if lost and not replace and not at_dest.is_same_request:
            raise InvalidRequestError(
                f"{dest} holds what another pull put there, and this one would remove or replace {_named(lost)}; add --replace, "
                "or name another directory"
            )
        if not at_dest.has(contents_of(coming)):
            check_room(mirrored.source, await agent.needs(dest, None, Tree.of(coming)))
        stage = await ready_stage(output, "staging", agent.pull(grant, dest, link=link))
        seconds = time.perf_counter() - began
    mount = stage.mounts[0]
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


async def _mirror(output: Output, requests: MirrorRequests, wanted: WeightsSource) -> tuple[MirrorSource, str]:
    """The source at its upstream's newest, in the mirror, and a grant. Where its upstream is away, it is said what is held."""
    begun = await requests.request([wanted], DEFAULT_ORGANISATION)
    try:
        mirror = await ready_mirror(output, "mirroring", requests.follow(begun.id, DEFAULT_ORGANISATION, 0.2))
    except ReportedError as error:
        held = None
        if error.code in _HUB_IS_AWAY:
            held = await requests.held(wanted, DEFAULT_ORGANISATION, is_newest=True)
        if held is not None:
            output.say(f"held here, for --offline: {_of_then(held)}")
        raise
    return mirror.sources[0], grant_of(mirror)


def _named(paths: Sequence[str]) -> str:
    shown, more = ", ".join(paths[:_PATHS_SHOWN]), len(paths) - _PATHS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _of_then(held: HeldSource) -> str:
    revision = f" at {held.source.resolved_revision}" if held.source.resolved_revision else ""
    return f"{held.source.source}{revision}, as mirrored {datetime.fromtimestamp(held.mirrored_at, UTC):%Y-%m-%d %H:%M} UTC"


def _line(pulled: Pulled) -> str:
    return (
        f"{pulled.destination}: {counted(pulled.files_total, 'file')}, {format_size(pulled.bytes_total)}, ready in "
        f"{pulled.seconds:.2f} s ({format_size(pulled.bytes_transferred)} from the upstream, "
        f"{format_size(pulled.bytes_from.mirror)} from the mirror, {format_size(pulled.bytes_from.node)} held already)"
    )
