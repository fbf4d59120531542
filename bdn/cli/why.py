"""``bdn-admin why``: explains from recorded events why something is cached or not."""

import os
from collections.abc import Sequence
from typing import Final

import click
from pydantic import BaseModel

from bdn.cli.clients import reachable_agent, reachable_mirror
from bdn.cli.output import Output, command_line
from bdn.core.errors import BdnError, NotFoundError
from bdn.core.events import Event, explanation
from bdn.core.units import format_size, format_time
from bdn.net.api_clients import MirrorClient
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventDocument, Named, StagedPath
from bdn.wire.mirror_schema import HeldManifest

_READ: Final = 1000  # newest events that explain the places
_MIRROR: Final = "the mirror"


class PlaceExplanation(BaseModel):
    """Whether one place has a manifest, and why."""

    manifest: str
    place: str
    cached: bool
    sentence: str


class Explanation(BaseModel):
    """The ``--json`` document for a digest or a source. ``events`` are newest first."""

    named: Named | None
    places: list[PlaceExplanation]
    events: list[EventDocument]


@click.command()
@click.argument("what", metavar="PATH|DIGEST|SOURCE")
@click.option("--node", metavar="NAME", help="Only events of this node.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of newest events to print."
)
@command_line
async def why(output: Output, *, what: str, node: str | None, limit: int) -> None:
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
            told = await agent.events({"path": path, "limit": str(limit)})
        lines = _staged_lines(told.staged) if told.staged else []
        lines += ["events of its manifest on this node, newest last:"] if told.items else []
        output.result(told, [*lines, *_story_lines(told.items)])
        return
    async with reachable_mirror(output) as client:
        found = await _explain(client, what, node, limit)
    output.result(found, _lines(found))


async def _explain(client: MirrorClient, what: str, node: str | None, limit: int) -> Explanation:
    named = await _named(client, what)
    events = await _events(client, what, named, node)
    if named is None and not events:
        raise NotFoundError(what)
    held = {one.manifest: one for one in (await client.held()).items}
    manifests = list(named.manifests) if named else []
    places = [place for manifest in manifests for place in _places(manifest, held.get(manifest), events, node)]
    return Explanation(named=named, places=places, events=events[:limit])


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


def _places(
    manifest: str, held: HeldManifest | None, events: Sequence[EventDocument], node: str | None
) -> list[PlaceExplanation]:
    """The mirror, every node that holds the manifest, and every node with an event about it."""
    holding = held.nodes if held else {}
    stories: dict[str, list[Event]] = {} if node else {_MIRROR: []}
    stories |= {f"node {name}": [] for name in holding if node is None or name.partition("/")[2] == node}
    for event in reversed(events):
        if event.manifest == manifest:
            place = _MIRROR if event.node is None else f"node {event.cluster}/{event.node}"
            stories.setdefault(place, []).append(event.event())
    if node is not None and not stories:
        stories[f"node {node}"] = []
    there = {f"node {name}" for name, one in holding.items() if one.bytes}
    there |= {_MIRROR} if held and held.mirror else set()
    return [
        PlaceExplanation(
            manifest=manifest,
            place=place,
            cached=place in there,
            sentence=explanation(story, place, is_here=place in there),
        )
        for place, story in stories.items()
    ]


def _lines(found: Explanation) -> list[str]:
    lines = _named_lines(found.named) if found.named else []
    lines += [f"{_short(place.manifest)} {place.sentence}" for place in found.places]
    lines += ["events, newest last:"] if found.events else []
    return [*lines, *_story_lines(found.events)]


def _named_lines(named: Named) -> list[str]:
    if named.kind in ("source", "manifest"):
        return [
            f"{manifest} was mirrored from {', '.join(sources) or 'sources no longer recorded'}"
            for manifest, sources in named.manifests.items()
        ]
    lines = []
    if named.kind == "page":
        lines = [f"{_short(named.of)} is a page of {manifest}" for manifest in named.manifests]
    for place in named.places:
        chunk = "" if place.chunk_index is None else f"chunk {place.chunk_index} of "
        what = {"content": "is", "slab": "is a slab that holds", "chunk": "is"}[named.kind]
        sources = ", ".join(named.manifests[place.manifest]) or "sources no longer recorded"
        lines.append(f"{_short(named.of)} {what} {chunk}{place.path} of {sources} ({place.manifest})")
    return lines


def _story_lines(events: Sequence[EventDocument]) -> list[str]:
    return [
        f"  {format_time(event.at.timestamp())}  {event.node or _MIRROR}  {_short(event.manifest or event.digest or '')} {event.sentence}"
        for event in reversed(events)
    ]


def _staged_lines(staged: StagedPath) -> list[str]:
    stage = staged.stage
    mount = next(mount for mount in stage.mounts if mount.mount_location == staged.mount_location)
    size = "" if staged.size is None else f", {format_size(staged.size)}"
    what = f"{staged.name} ({staged.digest}{size})" if staged.digest else staged.name
    came = mount.bytes_from
    lease = f"until {format_time(stage.expires_at.timestamp())}" if stage.expires_at else "until it is released"
    return [
        f"{staged.path} is {what} of {mount.source} ({staged.manifest})",
        f"stage {stage.id} of job {stage.job_id} is {stage.state}"
        + (f", and leases it {lease}" if stage.state == "READY" else ""),
        (
            f"of the mount's bytes {format_size(came.node)} were on this node, {format_size(came.cluster)} came from its cluster and "
            f"{format_size(came.mirror)} from the mirror"
        ),
        "its bytes are cached whole" if staged.cached else "its bytes are not, or not all, in the cache now",
    ]


def _short(digest: str) -> str:
    return f"{digest[:15]}…" if len(digest) > 15 else digest
