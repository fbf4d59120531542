"""The implementation of ``bdn pull``, on embedded or running services of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bdn.cli.hub_cache import PullPlace
from bdn.cli.output import Output
from bdn.cli.pull_plan import AtDestination, contents_of, plan_pull
from bdn.cli.pull_services import PullRequests, services_of_pull
from bdn.cli.pulled import as_mirrored, not_held, show_pulled
from bdn.cli.running import PullAgent, spare_collector
from bdn.cli.stage import grant_of, ready_mirror, ready_stage
from bdn.core.errors import InvalidRequestError
from bdn.core.room import Tree, check_room
from bdn.core.source.uri import WeightsSource
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.mirror_schema import MirrorSource
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import BytesFrom, StageDocument

_PATHS_SHOWN = 5
_HUB_IS_AWAY = ("UPSTREAM_UNAVAILABLE", "UPSTREAM_RATE_LIMITED")


async def run_pull(
    output: Output,
    wanted: WeightsSource,
    place: PullPlace,
    *,
    offline: bool,
    replace: bool,
    dry_run: bool,
) -> None:
    hub, link, is_hub = place.hub, place.link, place.hub is not None
    async with services_of_pull(output, is_alone=dry_run) as (requests, agent, own):
        began = time.perf_counter()
        held = await requests.held(wanted, DEFAULT_ORGANISATION, is_newest=offline)
        if held is None and offline:
            raise not_held(wanted)
        if held is None:
            from bdn.sources.opener import prepare  # noqa: PLC0415 - 250 ms

            await asyncio.to_thread(prepare, wanted.source.scheme)
            began = time.perf_counter()
        spare_collector()
        await agent.check_destination(place.at(None), hub=is_hub)
        if own is not None:
            mirror, embedded = own[0], own[1].pulls
            mirror.service.room.beside = lambda store, tree: embedded.needs(
                place.at(None), store, tree, link=link, hub=is_hub
            )
            if dry_run:
                planned = await plan_pull(mirror.service, embedded, wanted, held, place)
                output.result(planned, planned.lines())
                return
        if held is None:
            mirrored, grant = await _mirror(output, requests, wanted)
        else:
            mirrored, grant = held.source, held.grant
            if offline:
                output.say(f"offline: {as_mirrored(held.source, held.mirrored_at)}")
        commit = mirrored.resolved_revision or ""
        dest = place.at(commit)
        if not is_hub and not replace:
            await _check_losses(agent, requests, wanted, grant, dest)
        if own is not None:
            embedded = own[1].pulls
            coming = await embedded.coming(grant)
            at_dest = await AtDestination.look(embedded, requests, wanted, place, commit)
            if not at_dest.has(contents_of(coming)):
                needs = await embedded.needs(dest, None, Tree.of(coming), link=link, hub=is_hub)
                check_room(mirrored.source, needs)
        if hub is not None:
            tree = await requests.tree(hub.at(commit), DEFAULT_ORGANISATION, is_held=offline)
            await asyncio.to_thread(hub.write_tree, commit, tree)
        stage = await ready_stage(output, "staging", _since_now(agent.pull(grant, dest, link=link, hub=is_hub)))
        if hub is not None:
            await asyncio.to_thread(hub.write_ref, commit)
        seconds = time.perf_counter() - began
    transferred = mirrored.bytes_transferred if held is None else 0
    show_pulled(output, wanted, mirrored, stage.mounts[0], transferred=transferred, seconds=seconds)


async def _check_losses(
    agent: PullAgent, requests: PullRequests, wanted: WeightsSource, grant: str, dest: Path
) -> None:
    losses = await agent.would_lose(grant, dest)
    manifest = losses.earlier.removeprefix("b3:")
    if losses.lost and not await requests.is_update(manifest, wanted, DEFAULT_ORGANISATION):
        raise InvalidRequestError(
            f"{dest} holds files of another pull, and this pull would remove or replace {_named(losses.lost)}; add --replace, "
            "or name another directory"
        )


async def _mirror(output: Output, requests: PullRequests, wanted: WeightsSource) -> tuple[MirrorSource, str]:
    """Mirror the upstream's current version; returns it with a grant. If the upstream is down, prints what is held."""
    begun = await requests.request([wanted], DEFAULT_ORGANISATION)
    try:
        mirror = await ready_mirror(output, "mirroring", requests.follow(begun.id, DEFAULT_ORGANISATION, 0.2))
    except ReportedError as error:
        held = None
        if error.code in _HUB_IS_AWAY:
            held = await requests.held(wanted, DEFAULT_ORGANISATION, is_newest=True)
        if held is not None:
            output.say(f"held here, for --offline: {as_mirrored(held.source, held.mirrored_at)}")
        raise
    return mirror.sources[0], grant_of(mirror)


async def _since_now(updates: AsyncIterator[StageDocument]) -> AsyncIterator[StageDocument]:
    """For a stage that was READY before the request, count all bytes as held by the node."""
    asked_at = datetime.now(UTC)
    async for stage in updates:
        if stage.ready_at and stage.ready_at < asked_at:
            for mount in stage.mounts:
                mount.bytes_from = BytesFrom(node=mount.bytes_total or 0)
        yield stage


def _named(paths: Sequence[str]) -> str:
    shown, more = ", ".join(paths[:_PATHS_SHOWN]), len(paths) - _PATHS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
