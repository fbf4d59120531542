"""Taking manifests and contents off the disk, in the order that a crash can interrupt anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bdn.core.cache.index import CacheIndex, Victim
from bdn.core.digest import Digest
from bdn.disk.durable import disk_errors
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places


@dataclass(frozen=True)
class Found:
    """A manifest as it is on disk: its contents, which of them are whole (True) or in progress (False), its last use."""

    manifest: Digest
    contents: Mapping[Digest, int]
    present: Mapping[Digest, bool]
    last_used: float

    def restore(self, index: CacheIndex) -> None:
        """Count it."""
        index.restore(self.manifest, self.contents, self.present, last_used=self.last_used)


@dataclass(frozen=True)
class Removal:
    """Deletes what the index gave up. Blocking; methods raise ``DiskFailedError``."""

    places: Places
    records: ManifestRecords

    def remove(self, victims: Iterable[Victim]) -> None:
        """Manifest records first, then contents: after a crash in between, the start-up scan deletes what nobody names."""
        for victim in victims:
            self.records.forget(victim.manifest)
            for content in victim.contents:
                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):
                    with disk_errors(path):
                        path.unlink(missing_ok=True)

    def survivors(self, victims: Iterable[Victim]) -> list[Found]:
        """After a removal that failed half-way: what is still recorded. Manifests without a record are gone."""
        found: list[Found] = []
        for victim in victims:
            manifest = self.records.load(victim.manifest)
            if manifest is not None:
                last_used = self.records.last_used(victim.manifest)
                contents = manifest.contents
                found.append(Found(victim.manifest, contents, self.present(contents), last_used))
        return found

    def present(self, contents: Mapping[Digest, int]) -> dict[Digest, bool]:
        """Which contents are on disk: whole (True), or in progress (False)."""
        found: dict[Digest, bool] = {}
        for content, size in contents.items():
            path = self.places.file(content)
            with disk_errors(path):
                if path.exists() and path.stat().st_size == size:
                    found[content] = True
                elif self.places.part(content).exists():
                    found[content] = False
        return found

    def unbegun(self, contents: Iterable[Digest]) -> list[Digest]:
        """Those of which not a byte is on disk."""
        with disk_errors(self.places.filling):
            return [content for content in contents if not self.places.part(content).exists()]
