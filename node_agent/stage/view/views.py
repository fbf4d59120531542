"""The views of stages: one directory per stage with its mounts below, published with one rename."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, make_folder, remove_tree
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.build import Built, appear, build_view, compare_view, remove_view
from node_agent.stage.view.exposure import conceal, expose, mounts_below, unbind

_BUILDING: Final = ".building"
_DROPPING: Final = ".dropping"


@dataclass(frozen=True)
class Views:
    """``kind`` is how new stages are exposed. Methods block."""

    files: WholeFiles
    kind: ExposureKind

    @property
    def places(self) -> Places:
        return self.files.places

    def place(self, stage_id: str, mount_location: str) -> Path:
        """The path that the job gets for a mount."""
        return self.places.mounts / stage_id / mount_location.lstrip("/")

    def view(self, stage_id: str, mount_location: str, kind: ExposureKind) -> Path:
        """The files of a mount, for a stage exposed as ``kind``; never below a read-only mount."""
        return self._root(stage_id, kind) / mount_location.lstrip("/")

    def publish(self, stage_id: str, manifests: Mapping[str, Manifest], stop: threading.Event) -> dict[str, Built]:
        """Build all mounts of a stage aside, and publish them in one step, replacing an earlier view.

        Raises ``DiskFailedError``, ``CanceledError``, ``ChangedFilesError``: nothing of the new view is left.
        """
        root = self._root(stage_id, self.kind)
        aside = root.with_name(f"{stage_id}{_BUILDING}")
        with disk_errors(aside):
            self._remove(aside, manifests)
            try:
                make_folder(aside, 0o755)
                built = {}
                for location, manifest in manifests.items():
                    target = aside / location.lstrip("/")
                    make_folder(target.parent, 0o755)
                    built[location] = build_view(manifest, target, self.files, stop)
                appear(aside, root, replaces=True)
            finally:
                self._remove(aside, manifests)
        return built

    def expose(self, stage_id: str, mount_locations: Iterable[str]) -> None:
        for location in mount_locations:
            expose(self.kind, self.view(stage_id, location, self.kind), self.place(stage_id, location))

    def stands(self, stage_id: str, kind: ExposureKind) -> bool:
        """Whether a view of a stage exposed as ``kind`` exists. Raises ``DiskFailedError`` if that is unknown."""
        root = self._root(stage_id, kind)
        with disk_errors(root):
            return root.is_dir()

    def is_intact(self, stage_id: str, manifests: Mapping[str, Manifest]) -> bool:
        """Whether the published view has exactly its files, and the present kind of exposure."""
        try:
            return all(
                compare_view(manifest, self.view(stage_id, location, self.kind), self.files).is_intact
                for location, manifest in manifests.items()
            )
        except OSError:
            return False

    def drop(self, stage_id: str, manifests: Mapping[str, Manifest | None]) -> str | None:
        """Conceal and remove a view, however it was exposed. Idempotent. Returns notes for operators as ``conceal``.

        A manifest is None if it is no longer known, after a forced eviction.

        After a kill the view is whole or gone: its folder is renamed in one step, and emptied aside.

        Raises ``MountFailedError``, ``DiskFailedError``: something is left.
        """
        notes = [conceal(self.place(stage_id, location), self.places.mounts) for location in manifests]
        for root in (self.places.views / stage_id, self.places.mounts / stage_id):
            aside = root.with_name(f"{stage_id}{_DROPPING}")
            with disk_errors(root):
                for mounted in mounts_below(root):
                    unbind(mounted)  # left by a kill during a bind
                self._remove(aside, manifests)
                if root.is_dir():
                    root.rename(aside)
                    self._remove(aside, manifests)
        return "; ".join(note for note in notes if note) or None

    def drop_others(self, stage_ids: frozenset[str]) -> list[Path]:
        """At start: remove views and mounts of other stages, and unfinished views."""
        dropped = []
        for folder in (self.places.mounts, self.places.views):
            with disk_errors(folder):
                for path in sorted(folder.iterdir()):
                    if path.name in stage_ids or not path.name.startswith("stg_"):
                        continue
                    for mounted in mounts_below(path):
                        unbind(mounted)
                    remove_tree(path)
                    dropped.append(path)
        return dropped

    def _remove(self, aside: Path, manifests: Mapping[str, Manifest | None]) -> None:
        for location, manifest in manifests.items():
            if aside.is_dir():
                remove_view(aside / location.lstrip("/"), manifest, self.files)
        remove_tree(aside)

    def _root(self, stage_id: str, kind: ExposureKind) -> Path:
        return (self.places.mounts if kind == "none" else self.places.views) / stage_id
