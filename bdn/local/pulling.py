"""The implementation of a pull, on embedded or running services of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bdn.core.errors import InvalidRequestError
from bdn.core.room import Tree, check_room
from bdn.core.source.uri import WeightsSource
from bdn.local.hub_cache import tree_document, tree_entry
from bdn.local.pull_plan import AtDestination, PlannedPull, contents_of, plan_pull
from bdn.local.pull_services import PullRequests, services_of_pull
from bdn.local.pulled import Pull, Pulled, Say, as_mirrored, not_held, result_of
from bdn.local.services import PullAgent, Services
from bdn.mirror.ingest.requests import HeldSource
from bdn.net.waiting import grant_of, last_mirror, last_stage, ready_mirror, ready_stage
from bdn.settings import ClientSettings
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.mirror_schema import MirrorSource
from bdn.wire.progress import Report
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import BytesFrom, StageDocument

_PATHS_SHOWN = 5
_HUB_IS_AWAY = ("UPSTREAM_UNAVAILABLE", "UPSTREAM_RATE_LIMITED")


@dataclass(frozen=True)
class _Begun:
    """A pull whose destination was checked, and what it uses. ``own``: the services, if they are in this process."""

    requests: PullRequests
    agent: PullAgent
    own: Services | None
    held: HeldSource | None
    at: float


@asynccontextmanager
async def _begun(pull: Pull, settings: ClientSettings, say: Say, *, is_alone: bool) -> AsyncIterator[_Begun]:
    async with services_of_pull(settings, say, is_alone=is_alone) as (requests, agent, own):
        began = time.perf_counter()
        held = await requests.held(pull.wanted, DEFAULT_ORGANISATION, is_newest=pull.offline)
        if held is None and pull.offline:
            raise not_held(pull.wanted)
        if held is None:
            from bdn.sources.opener import prepare  # noqa: PLC0415 - 250 ms

            await asyncio.to_thread(prepare, pull.wanted.source.scheme)
            began = time.perf_counter()
        is_hub = pull.hub is not None
        await agent.check_destination(pull.at(None), hub=is_hub)
        if own is not None:
            mirror, embedded = own[0], own[1].pulls
            mirror.service.room.beside = lambda store, tree: embedded.needs(
                pull.at(None), store, tree, link=pull.link, hub=is_hub
            )
        yield _Begun(requests, agent, own, held, began)


async def planned(pull: Pull, settings: ClientSettings, say: Say) -> PlannedPull:
    async with _begun(pull, settings, say, is_alone=True) as begun:
        assert begun.own is not None, "a pull that is alone has its own services"  # noqa: S101
        mirror, embedded = begun.own[0], begun.own[1].pulls
        return await plan_pull(mirror.service, embedded, pull, begun.held)


async def carried_out(pull: Pull, settings: ClientSettings, say: Say, report: Report | None) -> Pulled:
    wanted, link, hub = pull.wanted, pull.link, pull.hub
    async with _begun(pull, settings, say, is_alone=False) as begun:
        requests, agent, held = begun.requests, begun.agent, begun.held
        if held is None:
            mirrored, grant = await _mirror(requests, wanted, say, report)
        else:
            mirrored, grant = held.source, held.grant
            if pull.offline:
                say(f"offline: {as_mirrored(held.source, held.mirrored_at)}")
        commit = mirrored.resolved_revision or ""
        dest = pull.at(commit)
        if hub is None and not pull.replace:
            await _check_losses(agent, requests, wanted, grant, dest)
        if begun.own is not None:
            embedded = begun.own[1].pulls
            coming = await embedded.coming(grant)
            at_dest = await AtDestination.look(embedded, requests, pull, commit)
            if not at_dest.has(contents_of(coming)):
                needs = await embedded.needs(dest, None, Tree.of(coming), link=link, hub=hub is not None)
                check_room(mirrored.source, needs)
        if hub is not None:
            tree = await requests.tree(hub.at(commit), DEFAULT_ORGANISATION, is_held=pull.offline)
            await asyncio.to_thread(hub.write_tree, commit, tree_document(map(tree_entry, tree)))
        updates = _since_now(agent.pull(grant, dest, link=link, hub=hub is not None))
        stage = ready_stage(await last_stage(updates, report))
        if hub is not None:
            await asyncio.to_thread(hub.write_ref, commit)
        seconds = time.perf_counter() - begun.at
    transferred = mirrored.bytes_transferred if held is None else 0
    return result_of(pull, mirrored, stage.mounts[0], transferred=transferred, seconds=seconds)


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


async def _mirror(
    requests: PullRequests, wanted: WeightsSource, say: Say, report: Report | None
) -> tuple[MirrorSource, str]:
    """Mirror the upstream's current version; returns it with a grant. If the upstream is down, says what is held."""
    begun = await requests.request([wanted], DEFAULT_ORGANISATION)
    try:
        updates = requests.follow(begun.id, DEFAULT_ORGANISATION, 0.2)
        mirror = ready_mirror(await last_mirror(updates, report))
    except ReportedError as error:
        held = None
        if error.code in _HUB_IS_AWAY:
            held = await requests.held(wanted, DEFAULT_ORGANISATION, is_newest=True)
        if held is not None:
            say(f"held here, for --offline: {as_mirrored(held.source, held.mirrored_at)}")
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
