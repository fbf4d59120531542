"""Which models a path on a node may show: mirrors mounted there, and the stage whose id the path contains."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import digest_in
from bdn.mirror.access.callers import Caller
from bdn.mirror.db.events import Wanted
from bdn.mirror.page.sources import Sources
from bdn.wire.mirror_schema import Mirror

_NEWEST: Final = 1000  # mirrors, and events
_SHOWN: Final = 20
_STAGE: Final = re.compile(r"/(stg_[0-9a-f]{24})(/.*)?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PathMatch:
    """``job`` is set if a recorded event names the path's stage together with this manifest."""

    source: str
    mount: str
    manifest: str
    job: str | None = None


def stage_and_place(path: str) -> tuple[str | None, str]:
    """The stage in a path of a view on a node, and the path that the job sees."""
    found = _STAGE.search(path)
    return (found[1], found[2] or "/") if found else (None, path)


def mounted_at(place: str, mirrors: Sequence[Mirror]) -> list[PathMatch]:
    """What READY sources show at or around a place, each manifest once, newest first."""
    found: dict[tuple[str, str], PathMatch] = {}
    for mirror in mirrors:
        for one in mirror.sources:
            mount = one.mount_location.rstrip("/")
            is_there = f"{place}/".startswith(f"{mount}/") or f"{mount}/".startswith(f"{place.rstrip('/')}/")
            if one.manifest is not None and is_there:
                found.setdefault((one.manifest, mount), PathMatch(one.source, mount, one.manifest))
    return list(found.values())


async def models_at(path: str, sources: Sources, caller: Caller) -> list[PathMatch]:
    """From the newest 1000 mirrors; only the stage's manifests if an event names the path."""
    stage, place = stage_and_place(path)
    mirrors, _ = await sources.requests.page(caller.organisation, "READY", None, None, _NEWEST, team=caller.team)
    found = mounted_at(place, mirrors)[:_SHOWN]
    if stage is None or not found:
        return found
    jobs = await _jobs_of(stage, found, sources, caller)
    staged = [
        PathMatch(one.source, one.mount, one.manifest, jobs[one.manifest]) for one in found if one.manifest in jobs
    ]
    return staged or found


async def _jobs_of(stage: str, found: Sequence[PathMatch], sources: Sources, caller: Caller) -> dict[str, str]:
    """The stage's job, by each manifest that an event names with it."""
    wanted = Wanted(sorted({digest_in(one.manifest).hex for one in found}))
    events, _ = await sources.events.page(caller.organisation, wanted, None, _NEWEST)
    of_stage = [event for event in events if event.facts.get("stage") == stage]
    return {event.manifest: str(event.facts.get("job", "")) for event in of_stage if event.manifest}
