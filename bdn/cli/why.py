"""``bdn-admin why``: explains from recorded events why something is cached or not."""

import os
from collections.abc import Sequence
from typing import Final

import click
from pydantic import BaseModel

from bdn.cli.clients import reachable_agent, reachable_mirror
from bdn.cli.output import Output, command_line, table, when
from bdn.core.errors import BdnError, NotFoundError
from bdn.core.printable import shortened
from bdn.core.units import counted, format_size
from bdn.net.api_clients import MirrorClient
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventDocument, Named, StagedPath
from bdn.wire.explained import CHANGES_NOTHING, MIRROR_PLACE, PlaceExplanation, explained

_READ: Final = 1000  # newest events that explain the places
_PRINTED: Final = 10  # places, and events
_IN_JSON: Final = 20  # events


class Explanation(BaseModel):
    """The ``--json`` document for a digest or a source. ``events`` are newest first."""

    named: Named | None
    places: list[PlaceExplanation]
    events: list[EventDocument]


@click.command()
@click.argument("what", metavar="PATH|DIGEST|SOURCE")
@click.option("--node", metavar="NAME", help="Only events of this node.")
@click.option("--limit", type=click.IntRange(1, 1000), help="Number of newest events to print; default: 10.")
@click.option("--all", "is_all", is_flag=True, help="Print every place and event, also those that changed nothing.")
@command_line
async def why(output: Output, *, what: str, node: str | None, limit: int | None, is_all: bool) -> None:
    """Explain where a source, manifest or file is cached, and why, from the events that the mirror and the nodes recorded.

    A digest names a manifest, a page, a chunk, a slab, or a file of 1 MiB or more; a source selects every manifest mirrored from it.
    Smaller files are in slabs and have a path only. The mirror keeps events for 30 days. This machine's agent explains a path, a
    file or folder of a stage. Exit code 4 if nothing is known.

    \b
    Example: bdn-admin why hf://org/model --node gpu-17
    Example: bdn-admin why /var/lib/bdn/cache/mounts/stg_0123456789abcdef01234567/app/model/config.json
    """
    if "://" not in what and not what.startswith("b3:"):
        # A view may be behind a link of ours, so do not resolve links.
        path = os.path.abspath(what)  # noqa: PTH100, ASYNC240
        async with reachable_agent(output) as agent:
            told = await agent.events({"path": path, "limit": str(_READ if is_all else limit or _IN_JSON)})
        lines = _staged_lines(told.staged) if told.staged else []
        output.result(told, [*lines, *_event_lines(told.items, limit, is_all=is_all)])
        return
    async with reachable_mirror(output) as client:
        found = await _explain(client, what, node)
    lines = [
        *([_answer(what, found.places)] if found.places else []),
        *(_named_lines(found.named) if found.named else []),
        *_place_lines(found.places, is_all=is_all),
        *_event_lines(found.events, limit, is_all=is_all),
    ]
    printed = found.events if is_all else found.events[: limit or _IN_JSON]
    output.result(found.model_copy(update={"events": printed}), lines)


async def _explain(client: MirrorClient, what: str, node: str | None) -> Explanation:
    named = await _named(client, what)
    events = await _events(client, what, named, node)
    if named is None and not events:
        raise NotFoundError(what)
    held = {one.manifest: one for one in (await client.held()).items}
    manifests = list(named.manifests) if named else []
    places = [place for manifest in manifests for place in explained(manifest, held.get(manifest), events, node)]
    return Explanation(named=named, places=places, events=events)


async def _events(client: MirrorClient, what: str, named: Named | None, node: str | None) -> list[EventDocument]:
    """Newest first, in several requests: a source may have been mirrored as hundreds of manifests."""
    manifests = list(named.manifests) if named else []
    several = (manifests[start : start + MANIFESTS_AT_ONCE] for start in range(0, len(manifests), MANIFESTS_AT_ONCE))
    subjects: list[dict[str, str | list[str]]] = [{"manifest": some} for some in several] or [{"digest": what}]
    found: list[EventDocument] = []
    for subject in subjects:
        found += (await client.events({**subject, "limit": str(_READ), **({"node": node} if node else {})})).items
    return sorted(found, key=lambda event: (event.at, event.id), reverse=True)[:_READ]


async def _named(client: MirrorClient, what: str) -> Named | None:
    """None if the mirror does not know the name; there may still be events about it."""
    try:
        return await client.named(what)
    except BdnError as error:
        if error.code != NotFoundError.code or "://" in what:
            raise
        return None


def _answer(what: str, places: Sequence[PlaceExplanation]) -> str:
    """One sentence: about the only place with its reason, about several places without."""
    if len(places) == 1:
        return shortened(f"{what} {places[0].sentence}")
    cached = dict.fromkeys(place.place for place in places if place.cached)
    others = dict.fromkeys(place.place for place in places if place.place not in cached)
    said = f"{what} is {'' if cached else 'not '}cached on {', '.join(cached or others)}"
    return shortened(f"{said}; not on {', '.join(others)}" if cached and others else said)


def _place_lines(places: Sequence[PlaceExplanation], *, is_all: bool) -> list[str]:
    if len(places) < 2:
        return []
    ordered = sorted(places, key=lambda place: not place.cached)
    printed = ordered if is_all else ordered[:_PRINTED]
    rows = [
        {
            "manifest": shortened(place.manifest),
            "place": place.place,
            "cached": "yes" if place.cached else "no",
            "why": shortened(place.reason),
        }
        for place in printed
    ]
    more = len(places) - len(printed)
    return [*table(rows), *([f"and {counted(more, 'more place')}: --all prints them"] if more else [])]


def _named_lines(named: Named) -> list[str]:
    if named.kind == "manifest":
        return [
            f"{shortened(manifest)} was mirrored from {', '.join(sources) or 'sources no longer recorded'}"
            for manifest, sources in named.manifests.items()
        ]
    lines = []
    if named.kind == "page":
        lines = [f"{shortened(named.of)} is a page of {manifest}" for manifest in named.manifests]
    for place in named.places:
        chunk = "" if place.chunk_index is None else f"chunk {place.chunk_index} of "
        what = {"content": "is", "slab": "is a slab that holds", "chunk": "is"}[named.kind]
        sources = ", ".join(named.manifests[place.manifest]) or "sources no longer recorded"
        lines.append(f"{shortened(named.of)} {what} {chunk}{place.path} of {sources} ({place.manifest})")
    return lines


def _event_lines(events: Sequence[EventDocument], limit: int | None, *, is_all: bool) -> list[str]:
    if not events:
        return []
    chosen = events if is_all else [event for event in events if event.kind not in CHANGES_NOTHING]
    printed = chosen if is_all else chosen[: limit or _PRINTED]
    is_one = len({event.manifest or event.digest for event in events}) == 1
    rows = [
        {
            "time": event.at,
            "place": event.node or MIRROR_PLACE,
            "manifest": None if is_one else shortened(event.manifest or event.digest or ""),
            "event": shortened(event.sentence),
        }
        for event in reversed(printed)
    ]
    more = len(events) - len(printed)
    rest = [f"and {counted(more, 'more event')}: --all prints them"] if more else []
    return [*table(rows, "no event changed anything"), *rest]


def _staged_lines(staged: StagedPath) -> list[str]:
    stage = staged.stage
    mount = next(mount for mount in stage.mounts if mount.mount_location == staged.mount_location)
    size = "" if staged.size is None else f", {format_size(staged.size)}"
    what = f"{staged.name} ({staged.digest}{size})" if staged.digest else staged.name
    state = "whole" if staged.cached else "not, or not whole,"
    came = mount.bytes_from
    lease = f"until {when(stage.expires_at)}" if stage.expires_at else "until it is released"
    return [
        f"{staged.path} is {state} in the cache: {what} of {mount.source} ({staged.manifest})",
        f"stage {stage.id} of job {stage.job_id} is {stage.state}"
        + (f", and leases it {lease}" if stage.state == "READY" else ""),
        (
            f"of the mount's bytes {format_size(came.node)} were on this node, {format_size(came.cluster)} came from its cluster and "
            f"{format_size(came.mirror)} from the mirror"
        ),
    ]
