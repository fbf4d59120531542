"""A model as the page shows it: where it is, which jobs hold it, and why it is or is not at a place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.units import counted, format_size, format_time
from bdn.wire.event_schema import EventDocument
from bdn.wire.explained import CHANGES_NOTHING, MIRROR_PLACE, PlaceExplanation, explained
from bdn.wire.mirror_schema import HeldManifest, Holding

PLACES_SHOWN: Final = 100  # a thousand nodes may hold a manifest
_EVENTS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class PlaceLine:
    """``name`` is ``the mirror`` or ``CLUSTER/NODE``. ``holders`` are jobs; empty for callers who may not see them."""

    name: str
    cluster: str | None
    node: str | None
    is_here: bool
    size: str
    used: str | None
    holders: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EventLine:
    at: str
    place: str
    sentence: str


@dataclass(frozen=True, slots=True)
class ModelView:
    """One manifest. ``answer`` is the summary or, with ``node``, why it is or is not on that node."""

    manifest: str
    sources: tuple[str, ...]
    node: str | None
    size: str | None
    files: str | None
    is_on_mirror: bool
    restorable_until: str | None
    answers: tuple[str, ...]
    places: tuple[PlaceLine, ...]
    hidden: int
    holders: tuple[str, ...]
    events: tuple[EventLine, ...]

    @property
    def title(self) -> str:
        return self.sources[0] if self.sources else self.manifest


def model_view(
    manifest: str,
    sources: Sequence[str],
    held: HeldManifest | None,
    events: Sequence[EventDocument],
    node: str | None = None,
) -> ModelView:
    """``events`` are newest first. ``node`` is ``NODE`` or ``CLUSTER/NODE``."""
    found = _explained(manifest, held, events, node)
    holdings = held.nodes if held else {}
    lines = sorted((_place(one, holdings, held) for one in found), key=_order)
    told = [event for event in events if event.manifest == manifest and event.kind not in CHANGES_NOTHING]
    return ModelView(
        manifest=manifest,
        sources=tuple(held.sources if held else sources) or tuple(sources),
        node=node,
        size=None if held is None or held.bytes_total is None else format_size(held.bytes_total),
        files=None if held is None or held.files_total is None else counted(held.files_total, "file"),
        is_on_mirror=bool(held and held.mirror),
        restorable_until=format_time(held.restorable_until.timestamp()) if held and held.restorable_until else None,
        answers=tuple(f"It {one.sentence}." for one in sorted(found, key=lambda one: one.place))
        if node
        else (_summary(lines),),
        places=tuple(lines[:PLACES_SHOWN]),
        hidden=max(0, len(lines) - PLACES_SHOWN),
        holders=tuple(dict.fromkeys(job for holding in holdings.values() for job in holding.held_by)),
        events=tuple(map(_event, told[:_EVENTS_SHOWN])),
    )


def _explained(
    manifest: str, held: HeldManifest | None, events: Sequence[EventDocument], node: str | None
) -> list[PlaceExplanation]:
    """With ``node``, its places alone; a name with ``/`` is a cluster and its node."""
    if node is None or "/" not in node:
        return explained(manifest, held, events, node)
    cluster, _, name = node.partition("/")
    there = [event for event in events if event.cluster in (None, cluster)]
    places = [one for one in explained(manifest, held, there, name) if one.place == f"node {node}"]
    return places or explained(manifest, None, (), node)


def _place(one: PlaceExplanation, holdings: dict[str, Holding], held: HeldManifest | None) -> PlaceLine:
    name = one.place.removeprefix("node ")
    holding = None if one.place == MIRROR_PLACE else holdings.get(name)
    cluster, slash, node = name.partition("/")
    size = "" if holding is None else _held_size(holding)
    if one.place == MIRROR_PLACE and held and held.mirror and held.bytes_total is not None:
        size = format_size(held.bytes_total)
    return PlaceLine(
        name=name,
        cluster=cluster if slash else None,
        node=node if slash else None,
        is_here=one.cached,
        size=size,
        used=format_time(holding.last_used) if holding and holding.last_used else None,
        holders=tuple(holding.held_by) if holding else (),
        reason=one.reason,
    )


def _held_size(holding: Holding) -> str:
    part = "" if holding.complete else ", incomplete"
    chunks = f" and {format_size(holding.cluster_bytes)} of chunks for its cluster" if holding.cluster_bytes else ""
    return f"{format_size(holding.bytes)}{part}{chunks}"


def _order(line: PlaceLine) -> tuple[bool, bool, bool, str]:
    return line.node is not None, not line.holders, not line.is_here, line.name


def _summary(lines: Sequence[PlaceLine]) -> str:
    nodes = sum(line.is_here for line in lines if line.node is not None)
    on_mirror = any(line.is_here for line in lines if line.node is None)
    where = [*(["the mirror"] if on_mirror else []), *([counted(nodes, "node")] if nodes else [])]
    jobs = len({job for line in lines for job in line.holders})
    held = f"; {counted(jobs, 'job')} {'holds' if jobs == 1 else 'hold'} it" if jobs else ""
    return f"It is cached on {' and '.join(where)}{held}." if where else "No tier holds it now."


def _event(event: EventDocument) -> EventLine:
    place = MIRROR_PLACE if event.node is None else f"{event.cluster}/{event.node}"
    return EventLine(format_time(event.at.timestamp()), place, event.sentence)
