"""The node tier on disk: manifests, each with its layout and its last use, and files whole or in progress."""

import os
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bdn.core.cache.index import CacheIndex, Victim
from bdn.core.chunk import Digest, FileLayout, Manifest, digest_of
from bdn.core.errors import InternalError
from bdn.disk.durable import disk_errors, write_durably
from bdn.wire.layout_form import Layout
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles

FILES_KEPT: Final = 200_000  # about 80 MB; a larger manifest is parsed each time


class RecentManifests:
    """The last used ones, as many as have ``limit`` files together. Shared by threads.

    It knows nothing of the disk: whoever asks makes sure that the manifest's record is still there.
    """

    def __init__(self, limit: int = FILES_KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._manifests: OrderedDict[Digest, Manifest] = OrderedDict()
        self._files = 0

    def get(self, digest: Digest) -> Manifest | None:
        """The manifest, if it is here; it is now the one used last."""
        with self._lock:
            found = self._manifests.get(digest)
            if found is not None:
                self._manifests.move_to_end(digest)
            return found

    def put(self, manifest: Manifest) -> None:
        """Keep it, and let go of the oldest while there are too many files."""
        with self._lock:
            self._drop(manifest.digest)
            self._manifests[manifest.digest] = manifest
            self._files += len(manifest.files)
            while self._files > self._limit:
                self._drop(next(iter(self._manifests)))

    def forget(self, digest: Digest) -> None:
        """It is evicted."""
        with self._lock:
            self._drop(digest)

    def _drop(self, digest: Digest) -> None:
        gone = self._manifests.pop(digest, None)
        if gone is not None:
            self._files -= len(gone.files)


@dataclass(frozen=True)
class Held:
    """A manifest with its layout. The layout is None where nobody needs it: for what is whole on this disk already.

    ``sender`` is the node that sent the layout; empty when the mirror did. Whole files were checked against their names; where it
    puts small ones in slabs may be out of date, or wrong.
    """

    manifest: Manifest
    layout: Layout | None
    sender: str = ""

    def file_layouts(self, wanted: Container[Digest]) -> Iterator[FileLayout]:
        """The layouts of these contents, as far as the manifest names them; ``InternalError`` where the layout disagrees."""
        found = self.layout.files if self.layout else {}
        for digest, size in self.manifest.contents.items():
            if digest in wanted:
                layout = found.get(digest)
                if layout is None or layout.size != size:
                    raise InternalError(f"manifest {self.manifest.digest} and its layout disagree about {digest}")
                yield layout


class ManifestRecords:
    """Reads and writes the folder ``manifests``. Blocking.

    The manifest itself is the commit point, both ways: content without it is rubbish that the next start removes.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._recent = RecentManifests()

    def save(self, held: Held, now: float) -> None:
        """Make a manifest and its layout durable, used at ``now``."""
        digest = held.manifest.digest
        path = self._places.manifest(digest)
        with disk_errors(path):
            if held.layout:
                write_durably(self._places.layout(digest), held.layout.pieces())
            if not path.exists():
                write_durably(path, held.manifest.pieces())
                self._recent.put(held.manifest)
        self.touch(digest, now)

    def touch(self, digest: Digest, now: float) -> None:
        """The manifest was used at ``now``; this is what keeps LRU order across restarts."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            os.utime(path, ns=(int(now * 1e9), int(now * 1e9)))

    def last_used(self, digest: Digest) -> float:
        """What ``touch`` said last."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            return path.stat().st_mtime

    def load(self, digest: Digest) -> Manifest | None:
        """The manifest; None when it is absent or is not what its name says. One that was read lately costs one look."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            recent = self._recent.get(digest)
            if recent is not None and path.exists():
                return recent
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        if digest_of(content) != digest:
            return None
        manifest = Manifest.parse(content)
        self._recent.put(manifest)
        return manifest

    def load_layout(self, digest: Digest) -> Layout | None:
        """The layout; None when it is absent or malformed: without it, chunks of larger files are not served, no more."""
        try:
            return Layout.parse(self._places.layout(digest).read_bytes())
        except (OSError, ValueError):
            return None

    def forget(self, digest: Digest) -> None:
        """Remove the manifest first, then what is noted beside it."""
        self._recent.forget(digest)
        with disk_errors(self._places.manifest(digest)):
            self._places.manifest(digest).unlink(missing_ok=True)
            self._places.layout(digest).unlink(missing_ok=True)
            self._places.pins(digest).unlink(missing_ok=True)

    def digests(self) -> Iterator[Digest]:
        """The names of all manifests here."""
        for path in self._places.manifests.iterdir():
            name, _, kind = path.name.partition(".")
            if kind == "json":
                yield Digest(name)


@dataclass(frozen=True)
class ScannedManifest:
    """A manifest as it is on disk: its contents, which of them are whole (True) or in progress (False), its last use."""

    manifest: Digest
    contents: Mapping[Digest, int]
    present: Mapping[Digest, bool]
    last_used: float

    def restore(self, index: CacheIndex) -> None:
        """Count it."""
        index.restore(self.manifest, self.contents, self.present, last_used=self.last_used)


@dataclass(frozen=True)
class CacheFiles:
    """Records of manifests, and files whole or in progress. Blocking; methods raise ``DiskFailedError``."""

    whole: WholeFiles
    records: ManifestRecords

    @property
    def places(self) -> Places:
        """Where they stand."""
        return self.whole.places

    def delete(self, victims: Iterable[Victim]) -> None:
        """Records of manifests first, then contents: after a crash in between, the start-up scan deletes what nobody names."""
        for victim in victims:
            self.whole.forget(victim.contents)
            self.records.forget(victim.manifest)
            for content in victim.contents:
                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):
                    with disk_errors(path):
                        path.unlink(missing_ok=True)

    def left_of(self, victims: Iterable[Victim]) -> list[ScannedManifest]:
        """After a deletion that failed half-way: what is still recorded. Manifests without a record are gone."""
        found: list[ScannedManifest] = []
        for victim in victims:
            manifest = self.records.load(victim.manifest)
            if manifest is not None:
                present, last_used = self._present(manifest.contents), self.records.last_used(victim.manifest)
                found.append(ScannedManifest(victim.manifest, manifest.contents, present, last_used))
        return found

    def _present(self, contents: Mapping[Digest, int]) -> dict[Digest, bool]:
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
