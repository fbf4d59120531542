"""A cache in a test's folder, and a place outside it where its trees are published."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bdn.core.layout import Manifest
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.destination import Destination, Earlier
from tests.support.agent.cache import cached, put, whole_files

OLD: Final = {"config.json": b"{}", "a/old": b"old"}
NEW: Final = {"config.json": b"{}", "a/new": b"new"}
STAMP: Final = 1_700_000_000_123_456_789


@dataclass
class Site:
    """A cache that holds two trees, and a place to publish them."""

    files: WholeFiles
    old: Manifest
    new: Manifest
    path: Path

    @classmethod
    def at(cls, root: Path, old: dict[str, bytes] = OLD, new: dict[str, bytes] = NEW) -> Self:
        places, first = cached(root / "cache", old)
        second = put(places, new)
        return cls(whole_files(places), first, second, root / "here/model")

    def publish(self, manifest: Manifest, earlier: Earlier | None = None, stage_id: str = "stg_x") -> Earlier:
        """As an agent does it, but for its records."""
        destination = Destination(self.path, stage_id, self.files, STAMP)
        with destination.claimed():
            try:
                _, inode = destination.build(manifest, earlier, threading.Event())
                destination.publish(manifest, earlier)
                destination.settle()
            finally:
                destination.clear()
        return Earlier(inode, manifest.digest, manifest, STAMP)

    def check(self, earlier: Earlier | None = None) -> None:
        Destination(self.path, "stg_x", self.files, STAMP).check(earlier)
