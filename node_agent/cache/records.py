"""The node tier on disk: manifests with their pages and last use, and files whole or in progress."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from bdn.core.cache.index import CacheIndex, Victim
from bdn.core.chunk import Digest, FileLayout, MalformedDocumentError, digest_of
from bdn.core.layout import Layout, Manifest, read_documents
from bdn.core.manifest import Root
from bdn.disk.durable import disk_errors, remove_tree, sync_folder, write_durably
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles

_Result = TypeVar("_Result")
FILES_KEPT: Final = 150_000  # about 90 MB; a larger manifest is parsed at each use


@dataclass(frozen=True)
class Held:
    """A manifest with its documents. ``pages`` are in the root's order."""

    root: Root
    manifest: Manifest
    layout: Layout
    pages: Sequence[bytes]

    @classmethod
    def of(cls, root: Root, pages: Sequence[bytes]) -> Self:
        """The caller has verified the documents' digests. Raises ``MalformedDocumentError``."""
        return cls(root, *read_documents(root, pages), pages)

    def file_layouts(self, wanted: Container[Digest]) -> Iterator[FileLayout]:
        """The layouts of the wanted contents that the manifest names."""
        return (self.layout[digest] for digest in self.manifest.contents if digest in wanted)


class RecentManifests:
    """An LRU cache of parsed manifests, bounded by ``limit`` files in total. Thread-safe.

    Does not check the disk: the caller checks that the manifest's record still exists.
    """

    def __init__(self, limit: int = FILES_KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._manifests: OrderedDict[Digest, Held] = OrderedDict()
        self._files = 0

    def get(self, digest: Digest) -> Held | None:
        with self._lock:
            found = self._manifests.get(digest)
            if found is not None:
                self._manifests.move_to_end(digest)
            return found

    def put(self, held: Held) -> None:
        with self._lock:
            self._drop(held.manifest.digest)
            self._manifests[held.manifest.digest] = held
            self._files += len(held.manifest.files)
            while self._files > self._limit:
                self._drop(next(iter(self._manifests)))

    def forget(self, digest: Digest) -> None:
        with self._lock:
            self._drop(digest)

    def _drop(self, digest: Digest) -> None:
        gone = self._manifests.pop(digest, None)
        if gone is not None:
            self._files -= len(gone.manifest.files)


class ManifestRecords:
    """Reads and writes the folder ``manifests``. Blocking.

    The root is written last and deleted first. Pages and content without a root are garbage that the next start
    removes.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._damaged: set[Digest] = set()  # manifests with a document on disk that does not match its digest
        self.recent = RecentManifests()

    def save(self, held: Held, now: float) -> None:
        """Make a manifest durable, used at ``now``: pages first, root last."""
        digest = held.root.digest
        path = self._places.manifest(digest)
        with disk_errors(path):
            if not path.exists() or digest in self._damaged:
                path.parent.mkdir(exist_ok=True)
                sync_folder(self._places.manifests)  # an earlier save may have made the folder and failed to sync
                for page, content in zip(held.root.pages, held.pages, strict=True):
                    write_durably(self._places.document(digest, page.digest), content)
                write_durably(path, held.root.content)
                self._damaged.discard(digest)
                self.recent.put(held)
        self.touch(digest, now)

    def touch(self, digest: Digest, now: float) -> None:
        """Set the manifest's last use to ``now``; LRU order survives restarts by these times."""
        path = self._places.manifest(digest)
        with disk_errors(path):
            os.utime(path, ns=(int(now * 1e9), int(now * 1e9)))

    def last_used(self, digest: Digest) -> float:
        path = self._places.manifest(digest)
        with disk_errors(path):
            return path.stat().st_mtime

    def load(self, digest: Digest) -> Held | None:
        """None if the manifest is absent or damaged. A recently read manifest costs one ``stat``."""
        recent = self.recent.get(digest)
        with disk_errors(path := self._places.manifest(digest)):
            if recent is not None and path.exists():
                return recent
        held = self._read(digest, lambda root, pages: Held.of(root, tuple(pages)))
        if held is not None:
            self.recent.put(held)
        return held

    def manifest(self, digest: Digest) -> Manifest | None:
        held = self.load(digest)
        return None if held is None else held.manifest

    def load_layout(self, digest: Digest) -> Layout | None:
        """The layout alone, with a tenth of the memory of ``load``."""
        recent = self.recent.get(digest)
        return recent.layout if recent is not None else self._read(digest, Layout.of)

    def load_root(self, digest: Digest) -> Root | None:
        """None if the manifest is absent or damaged."""
        return self._read(digest, lambda root, _: root)

    def _read(self, digest: Digest, of: Callable[[Root, Iterator[bytes]], _Result]) -> _Result | None:
        if not self._places.manifest(digest).exists():
            return None
        try:
            root = Root.parse(self._document(digest, digest))
            return of(root, (self._document(digest, page.digest) for page in root.pages))
        except MalformedDocumentError:
            self._damaged.add(digest)
            return None

    def _document(self, manifest: Digest, document: Digest) -> bytes:
        """Raises ``MalformedDocumentError`` if the document is absent or does not match its digest."""
        path = self._places.document(manifest, document)
        with disk_errors(path):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                content = b""
        if digest_of(content) != document:
            raise MalformedDocumentError(f"the content of {path} does not match its name")
        return content

    def tree(self, digest: Digest, commit: str) -> Path:
        """Where the listing of a hub's commit is kept; removed with the manifest."""
        return self._places.tree(digest, commit)

    def forget(self, digest: Digest) -> None:
        """Remove the root first, then its folder."""
        self.recent.forget(digest)
        path = self._places.manifest(digest)
        with disk_errors(path):
            path.unlink(missing_ok=True)
            remove_tree(path.parent)


@dataclass(frozen=True)
class ScannedManifest:
    """A manifest as found on disk. ``present``: which contents are whole (True) or in progress (False)."""

    manifest: Digest
    contents: Mapping[Digest, int]
    present: Mapping[Digest, bool]
    last_used: float

    def restore(self, index: CacheIndex) -> None:
        index.restore(self.manifest, self.contents, self.present, last_used=self.last_used)


@dataclass(frozen=True)
class CacheFiles:
    """Records of manifests, and files whole or in progress. Methods block and raise ``DiskFailedError``."""

    whole: WholeFiles
    records: ManifestRecords

    @property
    def places(self) -> Places:
        return self.whole.places

    def delete(self, victims: Iterable[Victim]) -> None:
        """Delete records before contents: after a crash in between, the next start deletes contents without a record."""
        for victim in victims:
            self.whole.forget(victim.contents)
            self.records.forget(victim.manifest)
            for content in victim.contents:
                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):
                    with disk_errors(path):
                        path.unlink(missing_ok=True)

    def left_of(self, victims: Iterable[Victim]) -> list[ScannedManifest]:
        """What is still recorded after a deletion that failed half-way. Manifests without a record are gone."""
        found: list[ScannedManifest] = []
        for victim in victims:
            held = self.records.load(victim.manifest)
            if held is not None:
                contents = held.manifest.contents
                present, last_used = self._present(contents), self.records.last_used(victim.manifest)
                found.append(ScannedManifest(victim.manifest, contents, present, last_used))
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
        with disk_errors(self.places.filling):
            return [content for content in contents if not self.places.part(content).exists()]
