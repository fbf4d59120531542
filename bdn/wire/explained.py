"""Why a manifest is, or is not, at each place, from holdings and recorded events."""

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel

from bdn.core.events import Event, explanation
from bdn.wire.event_schema import EventDocument
from bdn.wire.mirror_schema import HeldManifest

MIRROR_PLACE: Final = "the mirror"
CHANGES_NOTHING: Final = frozenset({"found", "renewed", "resumed", "reused"})  # kinds of events


class PlaceExplanation(BaseModel):
    """Whether one place has a manifest, and why. ``place`` is ``the mirror`` or ``node CLUSTER/NODE``."""

    manifest: str
    place: str
    cached: bool
    sentence: str

    @property
    def reason(self) -> str:
        """The sentence without its opening, which repeats place and presence."""
        return self.sentence.partition(self.place)[2].lstrip(":; ").removeprefix("because ")


def explained(
    manifest: str, held: HeldManifest | None, events: Sequence[EventDocument], node: str | None = None
) -> list[PlaceExplanation]:
    """The mirror, every node that holds the manifest, and every node with an event about it.

    Args:
        manifest: as ``b3:…``.
        held: what the tiers report of it.
        events: newest first.
        node: only agents of this name.
    """
    holding = held.nodes if held else {}
    stories: dict[str, list[Event]] = {} if node else {MIRROR_PLACE: []}
    stories |= {f"node {name}": [] for name in holding if node is None or name.partition("/")[2] == node}
    for event in reversed(events):
        if event.manifest == manifest and node in (None, event.node):
            place = MIRROR_PLACE if event.node is None else f"node {event.cluster}/{event.node}"
            stories.setdefault(place, []).append(event.event())
    if node is not None and not stories:
        stories[f"node {node}"] = []
    there = {f"node {name}" for name, one in holding.items() if one.bytes}
    there |= {MIRROR_PLACE} if held and held.mirror else set()
    return [
        PlaceExplanation(
            manifest=manifest,
            place=place,
            cached=place in there,
            sentence=explanation(story, place, is_here=place in there),
        )
        for place, story in stories.items()
    ]
