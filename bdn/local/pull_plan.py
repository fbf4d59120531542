"""The state of DEST before a pull, and ``bdn pull --dry-run``: what a pull would do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel

from bdn.core.room import Need, Tree, by_file_system, check_room
from bdn.core.units import counted, format_size
from bdn.wire.access_schema import DEFAULT_ORGANISATION

if TYPE_CHECKING:
    from bdn.core.chunk import Digest
    from bdn.core.layout import Manifest
    from bdn.local.pull_services import PullRequests
    from bdn.local.pulled import Pull
    from bdn.local.services import EmbeddedPulls
    from bdn.mirror.app import MirrorService
    from bdn.mirror.ingest.requests import HeldSource

Contents = Mapping[str, "Digest | None"]  # by path; None: not known yet


def contents_of(manifest: Manifest) -> Contents:
    return {file.path: file.digest for file in manifest.files}


@dataclass(frozen=True)
class AtDestination:
    """Files of an earlier pull at DEST, whether they are unchanged, and whether that pull was the same request.

    In the hub's cache a pull removes nothing: ``is_kept``.
    """

    path: Path
    files: Contents
    is_whole: bool
    is_same_request: bool
    is_kept: bool = False

    @classmethod
    async def look(cls, agent: EmbeddedPulls, requests: PullRequests, pull: Pull, commit: str | None) -> Self:
        """Reads records and, usually, no file."""
        dest, is_kept = pull.at(commit), pull.hub is not None
        path, earlier = await asyncio.to_thread(dest.resolve), await agent.earlier(dest)
        if earlier is None:
            return cls(path, {}, is_whole=False, is_same_request=False, is_kept=is_kept)
        is_same = await requests.is_update(earlier.digest.hex, pull.wanted, DEFAULT_ORGANISATION)
        return cls(path, contents_of(earlier), await agent.is_whole(dest, link=pull.link), is_same, is_kept)

    def lost(self, coming: Contents) -> list[str]:
        """The paths that this pull would remove or replace."""
        return [path for path, content in self.files.items() if not self.is_kept and coming.get(path) != content]

    def has(self, coming: Contents) -> bool:
        """Whether all coming files are at DEST already."""
        return self.is_whole and self.files == coming


class PlannedRoom(BaseModel):
    """Space that a pull needs and has on one file system. ``parts`` are bytes by purpose and path."""

    bytes_needed: int
    bytes_free: int
    parts: dict[str, int]


class PlannedPull(BaseModel):
    """``bytes_to_transfer`` would come from the upstream; ``bytes_held`` are in the mirror's store.

    ``is_there``: DEST has all files, and the pull would do nothing. The pull would delete the files ``removed`` of an
    earlier pull and overwrite the files ``replaced``; with ``replace_needed`` it refuses to without ``--replace``.
    """

    source: str
    destination: str
    resolved_revision: str | None
    files_total: int
    bytes_total: int
    bytes_to_transfer: int
    bytes_held: int
    is_there: bool
    removed: list[str]
    replaced: list[str]
    replace_needed: bool
    room: list[PlannedRoom]
    warnings: list[str]

    def lines(self) -> list[str]:
        came = f"{format_size(self.bytes_to_transfer)} would come from the upstream, {format_size(self.bytes_held)} are held already"
        found = [f"{self.destination}: {counted(self.files_total, 'file')}, {format_size(self.bytes_total)}; {came}"]
        if self.is_there:
            found.append("  all files are there; nothing to do")
        needed = ", which needs --replace" if self.replace_needed else ""
        found += [f"  would remove {path}{needed}" for path in self.removed]
        found += [f"  would replace {path}{needed}" for path in self.replaced]
        for room in self.room:
            parts = ", ".join(f"{format_size(size)} for {what}" for what, size in room.parts.items())
            found.append(f"  needs {format_size(room.bytes_needed)} of {format_size(room.bytes_free)} free: {parts}")
        return found


async def plan_pull(service: MirrorService, agent: EmbeddedPulls, pull: Pull, held: HeldSource | None) -> PlannedPull:
    """Query the upstream, unless the source is ``held``, and the disks.

    Raises the errors of the pull: ``NoRoomError``, an error of the cache or of the upstream. A missing ``--replace`` is
    not an error here; the plan reports it.
    """
    needs: list[Need] = []
    coming: Contents
    if held is None:
        planned, survey = await service.requests.foresee(pull.wanted, DEFAULT_ORGANISATION)
        coming, tree = await service.room.look(survey)
        files, transfer = planned.files, planned.bytes_to_transfer
        revision, warnings = planned.resolved_revision, planned.warnings
        if transfer:
            needs = await service.room.needs(survey)
    else:
        manifest = await agent.coming(held.grant)
        coming, tree = contents_of(manifest), Tree.of(manifest)
        files, transfer = len(manifest.files), 0
        revision, warnings = held.source.resolved_revision, held.source.warnings
    dest = await AtDestination.look(agent, service.requests, pull, revision)
    lost, is_there = dest.lost(coming), dest.has(coming)
    if not transfer and not is_there:
        needs = await agent.needs(dest.path, None, tree, link=pull.link, hub=pull.hub is not None)
    check_room(str(pull.wanted.source), needs)
    return PlannedPull(
        source=str(pull.wanted.source),
        destination=str(dest.path),
        resolved_revision=revision,
        files_total=files,
        bytes_total=tree.size,
        bytes_to_transfer=transfer,
        bytes_held=tree.size - transfer,
        is_there=is_there,
        removed=[path for path in lost if path not in coming],
        replaced=[path for path in lost if path in coming],
        replace_needed=bool(lost) and not dest.is_same_request,
        room=[
            PlannedRoom(
                bytes_needed=one.needed,
                bytes_free=max(0, one.free),
                parts={f"{need.what} at {need.path}": need.size for need in one.needs},
            )
            for one in by_file_system(needs)
        ],
        warnings=warnings,
    )
