"""Where everything stands below the agent's cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bdn.core.digest import Digest
from node_agent.disk.durable import make_folder

_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711  # who knows a stage's id may pass; nobody may list
_PUBLIC: Final = 0o755


class Places:
    """Paths, and nothing else. ``files`` holds whole files by digest; whatever is not whole is in ``filling``.

    Content is private to the agent: other users of the machine reach it through the views that they were given.
    """

    def __init__(self, root: Path, mounts: Path | None = None) -> None:
        self.root = root.absolute()
        self.owner = self.root / "owner"
        self.files = self.root / "files"
        self.filling = self.root / "filling"
        self.manifests = self.root / "manifests"
        self.stages = self.root / "stages"
        self.views = self.root / "views"
        self.quarantine = self.root / "quarantine"
        self.trusted_keys = self.root / "trusted-keys.json"
        self.mounts = (mounts or self.root / "mounts").absolute()

    def make(self) -> None:
        """Make what is absent."""
        make_folder(self.root, _PUBLIC)  # one that the operator made keeps its mode
        for folder in (self.files, self.filling, self.manifests, self.stages, self.quarantine):
            make_folder(folder, _PRIVATE)
        make_folder(self.views, _PASSABLE)
        make_folder(self.mounts, _PUBLIC)

    def file(self, digest: Digest) -> Path:
        """A whole, verified file."""
        return self.files / digest.fanout

    def part(self, digest: Digest) -> Path:
        """A file that is being filled."""
        return self.filling / f"{digest.hex}.part"

    def bitmap(self, digest: Digest) -> Path:
        """Which chunks of a part are durable."""
        return self.filling / f"{digest.hex}.bitmap"

    def manifest(self, digest: Digest) -> Path:
        """A held manifest; its modification time is when it was used last."""
        return self.manifests / f"{digest.hex}.json"

    def layout(self, digest: Digest) -> Path:
        """Where a held manifest's bytes lie."""
        return self.manifests / f"{digest.hex}.layout.json"

    def stage(self, stage_id: str) -> Path:
        """The record of a stage."""
        return self.stages / f"{stage_id}.json"
