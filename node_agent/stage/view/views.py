"""The views of stages: one directory per stage with its mounts below, published with one rename."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bdn.core.layout import Manifest
from bdn.disk.binding import mounts_below, unbind
from bdn.disk.durable import disk_errors, make_folder, remove_tree
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.build import Built, appear, build_view, compare_view, remove_view
from node_agent.stage.view.exposure import conceal, expose

_BUILDING: Final = ".building"
_DROPPING: Final = ".dropping"


class Shown(Protocol):
    """What a stage shows at one of its places. Methods block."""

    def build(self, root: Path, files: WholeFiles, stop: threading.Event) -> Built:
        """Create the directory ``root``. The caller removes it after an error."""

    def is_intact(self, root: Path, files: WholeFiles) -> bool:
        """Whether the directory has exactly what was built. Raises ``OSError``."""

    def remove(self, root: Path, files: WholeFiles) -> None:
        """Remove the directory, which may be absent or not finished yet."""


@dataclass(frozen=True, slots=True)
class ManifestFiles:
    """The files of a manifest, by their paths."""

    manifest: Manifest

    def build(self, root: Path, files: WholeFiles, stop: threading.Event) -> Built:
        return build_view(self.manifest, root, files, stop)

    def is_intact(self, root: Path, files: WholeFiles) -> bool:
        return compare_view(self.manifest, root, files).is_intact

    def remove(self, root: Path, files: WholeFiles) -> None:
        remove_view(root, self.manifest, files)


@dataclass(frozen=True)
class Views:
    """``kind`` is how new stages are exposed. A place is a path below the stage's own directory. Methods block."""

    files: WholeFiles
    kind: ExposureKind

    @property
    def places(self) -> Places:
        return self.files.places

    def place(self, stage_id: str, place: str) -> Path:
        """The path that the job gets for a place."""
        return self.places.mounts / stage_id / place.lstrip("/")

    def view(self, stage_id: str, place: str, kind: ExposureKind) -> Path:
        """What a place shows, for a stage exposed as ``kind``; never below a read-only mount."""
        return self._root(stage_id, kind) / place.lstrip("/")

    def publish(self, stage_id: str, shown: Mapping[str, Shown], stop: threading.Event) -> dict[str, Built]:
        """Build all places of a stage aside, and publish them in one step, replacing an earlier view.

        Raises ``DiskFailedError``, ``CanceledError``, ``ChangedFilesError``: nothing of the new view is left.
        """
        root = self._root(stage_id, self.kind)
        aside = root.with_name(f"{stage_id}{_BUILDING}")
        with disk_errors(aside):
            self._remove(aside, shown)
            try:
                make_folder(aside, 0o755)
                built = {}
                for place, one in shown.items():
                    target = aside / place.lstrip("/")
                    make_folder(target.parent, 0o755)
                    built[place] = one.build(target, self.files, stop)
                appear(aside, root, replaces=True)
            finally:
                self._remove(aside, shown)
        return built

    def expose(self, stage_id: str, places: Iterable[str]) -> None:
        for place in places:
            expose(self.kind, self.view(stage_id, place, self.kind), self.place(stage_id, place))

    def stands(self, stage_id: str, kind: ExposureKind) -> bool:
        """Whether a view of a stage exposed as ``kind`` exists. Raises ``DiskFailedError`` if that is unknown."""
        root = self._root(stage_id, kind)
        with disk_errors(root):
            return root.is_dir()

    def is_intact(self, stage_id: str, shown: Mapping[str, Shown]) -> bool:
        """Whether the published view has exactly its files, and the present kind of exposure."""
        try:
            return all(one.is_intact(self.view(stage_id, place, self.kind), self.files) for place, one in shown.items())
        except OSError:
            return False

    def drop(self, stage_id: str, shown: Mapping[str, Shown | None]) -> str | None:
        """Conceal and remove a view, however it was exposed. Idempotent. Returns notes for operators as ``conceal``.

        A value of ``shown`` is None if a forced eviction has removed the manifest.

        After a kill the view is whole or gone: its folder is renamed in one step, and emptied aside.

        Raises ``MountFailedError``, ``DiskFailedError``: something is left.
        """
        notes = [conceal(self.place(stage_id, place), self.places.mounts) for place in shown]
        for root in (self.places.views / stage_id, self.places.mounts / stage_id):
            aside = root.with_name(f"{stage_id}{_DROPPING}")
            with disk_errors(root):
                for mounted in mounts_below(root):
                    unbind(mounted)  # left by a kill during a bind
                self._remove(aside, shown)
                if root.is_dir():
                    root.rename(aside)
                    self._remove(aside, shown)
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

    def _remove(self, aside: Path, shown: Mapping[str, Shown | None]) -> None:
        for place, one in shown.items():
            if one is not None and aside.is_dir():
                one.remove(aside / place.lstrip("/"), self.files)
        remove_tree(aside)

    def _root(self, stage_id: str, kind: ExposureKind) -> Path:
        return (self.places.mounts if kind == "none" else self.places.views) / stage_id
