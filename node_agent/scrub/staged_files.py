"""Which staged files a path means, where a job sees them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.manifest import FileEntry
from node_agent.cache.records import ManifestRecords
from node_agent.stage.record import MountRecord, StageRecord
from node_agent.stage.stage import NodeStage, StageRegistry
from node_agent.stage.view.views import Views


@dataclass(frozen=True)
class StagedFile:
    """``path`` is where it can be written to, which is not below a read-only mount; ``shown`` is where jobs find it."""

    path: Path
    shown: str
    manifest: Digest
    entry: FileEntry


@dataclass(frozen=True)
class StagedFiles:
    """Looks through the READY stages. Blocking."""

    registry: StageRegistry
    views: Views
    records: ManifestRecords

    def find(self, path: str) -> list[StagedFile]:
        """The file at ``path``, or all that are below it.

        Raises:
            NotFoundError: it is not in a view of a READY stage.
        """
        asked = Path(os.path.abspath(path))  # noqa: PTH100 - as it is written: a link to a view may be part of it
        found: dict[Path, StagedFile] = {}
        for file in (*self._below(asked), *self._below(_real(asked))):  # a view may be known by both names
            found.setdefault(file.path, file)
        if not found:
            raise NotFoundError(
                f"a staged file at or below {path}: nothing of a READY stage of this node stands there, it"
            )
        return list(found.values())

    def named(self, content: Digest) -> Iterator[tuple[NodeStage, Path]]:
        """Where views show this content, also of stages that are still being staged; not all of these paths need exist."""
        for stage in self.registry.all():
            if stage.record.state not in ("STAGING", "READY"):
                continue
            for mount in stage.record.mounts:
                manifest, view = self.records.load(mount.digest), self._view(stage.record, mount)
                for entry in manifest.files if manifest else ():
                    if entry.digest == content and _real((view / entry.path).parent).is_relative_to(_real(view)):
                        yield stage, view / entry.path

    def _below(self, asked: Path) -> Iterator[StagedFile]:
        for stage in self.registry.all():
            if stage.record.state != "READY":
                continue
            for mount in stage.record.mounts:
                for shown in self._places(stage.record, mount):
                    if shown in (asked, *asked.parents) or asked in shown.parents:
                        yield from self._files(stage.record, mount, shown, asked)
                        break

    def _places(self, record: StageRecord, mount: MountRecord) -> tuple[Path, ...]:
        place = record.destination or self.views.place(record.id, mount.mount_location)
        return tuple(dict.fromkeys((place, _real(place), self._view(record, mount))))

    def _view(self, record: StageRecord, mount: MountRecord) -> Path:
        if record.destination is not None:
            return record.destination
        return self.views.view(record.id, mount.mount_location, mount.exposure or self.views.kind)

    def _files(self, record: StageRecord, mount: MountRecord, shown: Path, asked: Path) -> Iterator[StagedFile]:
        manifest = self.records.load(mount.digest)
        below = PurePosixPath(asked.relative_to(shown)) if asked.is_relative_to(shown) else PurePosixPath()
        view = self._view(record, mount)
        root = _real(view)
        for entry in manifest.files if manifest else ():
            if PurePosixPath(entry.path).is_relative_to(below):
                path = view / entry.path
                if _real(path.parent).is_relative_to(root):  # not through a link that somebody put there
                    yield StagedFile(path, str(shown / entry.path), mount.digest, entry)


def _real(path: Path) -> Path:
    """Where its links lead. One that leads to itself is left as it is: ``Path.resolve`` raises, and another error each version."""
    return Path(os.path.realpath(path))
