"""Repairs damaged files and the views that show them.

Right bytes come from this node's own tiers, else from the sources of any fill, with a grant that a job left here.
Chunks are rewritten in place. A file that cannot be repaired becomes a partial file or is quarantined, and views are
linked to its replacement.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from bdn.core.cache.index import Holder
from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, FileLayout, PlacedChunk, digest_of
from bdn.core.errors import BdnError, DiskFailedError, GrantInvalidError, NotFoundError
from bdn.core.layout import Layout
from bdn.core.pace.rate_limit import TrafficClass
from bdn.disk.direct import UncachedFile
from bdn.disk.durable import disk_errors, opened, sync_folder, write_all, write_durably
from bdn.disk.threads import in_thread, to_the_end
from bdn.transfer.byte_threads import BufferPool
from bdn.transfer.chunk_readers import ChunkReader, fetch
from node_agent.cache.quarantine import Quarantine
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.disk.whole_files import ChangedFilesError, WholeFiles
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing, chunks_in_order
from node_agent.fill.part import Bitmap, cut
from node_agent.fill.provision import FillRequest, Provision
from node_agent.scrub.reading import single_chunk
from node_agent.stage.stage import MountRecord, NodeStage, StageRecord, StageRegistry
from node_agent.stage.view.views import Views
from node_agent.trust import Trust

logger = logging.getLogger(__name__)
Put = Callable[[memoryview], None]
_HOLDER: Final = Holder("scrub", "scrub")
_AS_FOUND: Final = os.O_RDONLY | os.O_NOFOLLOW
_READ_ONLY: Final = 0o444
_OURS: Final = 0o644
_ALREADY_DUE: Final = 0.0  # monotonic seconds


@dataclass(frozen=True)
class RepairGrants:
    """Grants of known stages and of running commands.

    Grants of ended jobs count as well: a grant is valid until it expires, and its manifests are still cached.
    ``is_open``: the mirror requires no grants, so an expired grant also counts.
    """

    registry: StageRegistry
    trust: Trust
    is_open: bool
    _borrowed: list[str] = field(default_factory=list)

    @contextmanager
    def using(self, grants: Sequence[str]) -> Iterator[None]:
        self._borrowed.extend(grants)
        try:
            yield
        finally:
            for grant in grants:
                self._borrowed.remove(grant)

    def find(self, manifests: Collection[Digest]) -> tuple[Digest, str]:
        """One of these manifests, and a grant for it. Raises ``GrantInvalidError`` if none is valid."""
        known = [
            (manifest, stage.record.grant)
            for stage in self.registry.all()
            for manifest in stage.record.manifests
            if manifest in manifests
        ]
        for token in (*self._borrowed, *(grant for _, grant in known)):
            if (named := self._valid(token, manifests)) is not None:
                return named, token
        if known and self.is_open:
            return known[0]
        raise GrantInvalidError("no stage of this node has a valid one for the content to fetch; stage it again")

    def _valid(self, token: str, manifests: Collection[Digest]) -> Digest | None:
        try:
            grant = self.trust.verify(token)
        except BdnError:
            return None
        return next((manifest for manifest in manifests if grant.allows(manifest)), None)


@dataclass(frozen=True)
class RepairSource:
    """Fetches chunks and whole files with the priority of a scrub. ``stop`` cancels transfers.

    ``layouts`` loads the layout of a held manifest. Blocking.
    """

    provision: Provision
    grants: RepairGrants
    layouts: Callable[[Digest], Layout | None]
    buffers: BufferPool
    stop: threading.Event

    async def layout(self, content: Digest, size: int) -> FileLayout | None:
        """The file's layout; None if neither this disk nor the mirror provides it."""
        if size <= CHUNK_SIZE:
            return single_chunk(content, size)
        for manifest in self.provision.cache.index.named_by(content):
            layout = await in_thread(self.layouts, manifest)
            if layout and content in layout:
                return layout[content]
        with suppress(BdnError):  # the file as a whole can still be verified
            return (await self._open(content))[0]
        return None

    async def fetch(self, content: Digest, chunk: PlacedChunk, put: Put) -> None:
        """Pass the verified chunk of a file to ``put``, in a thread.

        Raises ``BdnError`` if the chunk cannot be fetched; the errors of ``put``.
        """
        if await in_thread(self._read_held, chunk, put):
            return
        file, reader = await self._open(content)
        size = file.slice.slab_size if file.slice else chunk.range.size
        async with self.provision.bandwidth.turn(TrafficClass.SCRUB, size):
            await in_thread(self._fetch, file, reader, chunk, put)

    async def refill(self, content: Digest) -> None:
        """Fill a file again, through a manifest that lacks nothing else, so that no unwanted file is fetched.

        Leases the manifest meanwhile. One call at a time.

        Raises:
            NotFoundError: no such manifest. The next stage of a manifest with this content fills it.
            BdnError: the content cannot be fetched.
        """
        index = self.provision.cache.index
        named = [manifest for manifest in index.named_by(content) if index.is_complete_but_for(manifest, content)]
        if not named:
            raise NotFoundError(f"a manifest on this node that lacks only {content}")
        manifest, grant = self.grants.find(named)
        # Lease before the fill: a manifest evicted in between would be filled completely.
        if not await self.provision.cache.lease(manifest, _HOLDER):
            raise NotFoundError(f"manifest {manifest} on this node")
        try:
            await self.provision.run(FillRequest([manifest], grant, _HOLDER, TrafficClass.SCRUB, lambda *_: None))
        finally:
            await to_the_end(self.provision.cache.leave(_HOLDER.stage_id))

    def _read_held(self, chunk: PlacedChunk, put: Put) -> bool:
        with self.buffers.take(chunk.range.size) as buffer:
            if self.provision.cache.chunks.read_held(chunk.digest, buffer) is None:
                return False
            put(buffer)
            return True

    async def _open(self, content: Digest) -> tuple[FileLayout, ChunkReader]:
        provision = self.provision
        manifest, bearer = self.grants.find(provision.cache.index.named_by(content))
        layout = (await provision.catalogue.obtain(manifest, bearer, is_complete=False)).layout
        file, peers = layout[content], provision.chain.peers
        routing = Routing(partial(chunks_in_order, layout), peers.members)
        budget = RetryBudget(file.size, peers.avoided)
        return file, provision.chain.of_fill(FillContext(manifest, bearer, routing, budget), self.stop)

    def _fetch(self, file: FileLayout, reader: ChunkReader, chunk: PlacedChunk, put: Put) -> None:
        """A small file is cut out of its slab, which is transferred whole."""
        place = file.slice
        if place is None:
            with self.buffers.take(chunk.range.size) as buffer:
                fetch(reader, chunk.digest, buffer, lambda: put(buffer))
            return
        with self.buffers.take(place.slab_size) as slab:
            fetch(reader, place.slab, slab, lambda: put(cut(file, slab)))


# --- damaged files, and the views that show them ---


@dataclass(frozen=True)
class StagedFile:
    """``path`` is writable, not below a read-only mount; ``shown`` is the path that jobs see."""

    path: Path
    shown: str
    manifest: Digest
    entry: FileEntry


@dataclass(frozen=True)
class FilesOfStages:
    registry: StageRegistry
    views: Views
    records: ManifestRecords

    def find(self, path: str) -> list[StagedFile]:
        """The file at ``path``, or all files below it. Raises ``NotFoundError`` if no READY stage shows it."""
        asked = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links: the path may lead through a link to a view
        found: dict[Path, StagedFile] = {}
        for file in (*self._below(asked), *self._below(_real(asked))):  # a view may be known by both names
            found.setdefault(file.path, file)
        if not found:
            raise NotFoundError(f"a file of a READY stage of this node at or below {path}")
        return list(found.values())

    def named(self, content: Digest) -> Iterator[tuple[NodeStage, Path]]:
        """Paths of this content in views, including stages still being staged; some may not exist."""
        for stage in self.registry.all():
            if stage.record.state not in ("STAGING", "READY"):
                continue
            for mount in stage.record.mounts:
                for _, path in self._entries(stage.record, mount, lambda entry: entry.digest == content):
                    yield stage, path

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
        place = record.destination or self.views.place(record.id, record.files_at(mount))
        return tuple(dict.fromkeys((place, _real(place), self._view(record, mount))))

    def _view(self, record: StageRecord, mount: MountRecord) -> Path:
        if record.destination is not None:
            return record.destination
        return self.views.view(record.id, record.files_at(mount), mount.exposure or self.views.kind)

    def _files(self, record: StageRecord, mount: MountRecord, shown: Path, asked: Path) -> Iterator[StagedFile]:
        below = PurePosixPath(asked.relative_to(shown)) if asked.is_relative_to(shown) else PurePosixPath()
        for entry, path in self._entries(record, mount, lambda one: PurePosixPath(one.path).is_relative_to(below)):
            yield StagedFile(path, str(shown / entry.path), mount.digest, entry)

    def _entries(
        self, record: StageRecord, mount: MountRecord, is_meant: Callable[[FileEntry], bool]
    ) -> Iterator[tuple[FileEntry, Path]]:
        manifest, view = self.records.manifest(mount.digest), self._view(record, mount)
        root = _real(view.parents[1] / "blobs" if record.hub else view)
        for entry in filter(is_meant, manifest.files if manifest else ()):
            path = _real(view / entry.path) if record.hub else view / entry.path
            if _real(path.parent).is_relative_to(root):  # not through a link that another process put there
                yield entry, path


def _real(path: Path) -> Path:
    """Used instead of ``Path.resolve``, which raises for link loops, with different errors per Python version."""
    return Path(os.path.realpath(path))


@dataclass(frozen=True)
class FileRepair:
    """Removes files from the cache, and links views to their replacements. Blocking; methods raise ``DiskFailedError``.

    Views keep their links to a removed file: no running job loses a file.
    """

    files: WholeFiles
    quarantine: Quarantine
    staged: FilesOfStages

    @property
    def places(self) -> Places:
        return self.files.places

    # --- out of the cache; each returns whether a partial file remains ---

    def to_part(self, file: FileLayout, wrong: Collection[int]) -> bool:
        """Turn the file into a partial file with its right chunks, so that the next fill resumes from them.

        The inode stays, so views that link to it heal with that fill. A file without a right chunk is deleted: its
        bytes are evidence.
        """
        place, part = self.places.file(file.digest), self.places.part(file.digest)
        self.files.forget((file.digest,))
        with disk_errors(place):
            right = [index for index in range(len(file.chunks)) if index not in wrong]
            if not right:
                place.unlink(missing_ok=True)
                return False
            bitmap = Bitmap(len(file.chunks))
            bitmap.add(right)
            write_durably(self.places.bitmap(file.digest), bitmap.to_bytes())  # ignored without its partial file
            place.chmod(_OURS)
            place.rename(part)
            for folder in (part.parent, place.parent):
                sync_folder(folder)
        return True

    def to_quarantine(self, content: Digest) -> bool:
        """Quarantine the file, so that it occupies the bad blocks of the disk and another file is filled elsewhere."""
        place = self.places.file(content)
        self.files.forget((content,))
        with disk_errors(place):
            if place.exists():
                self.quarantine.take(place)
                sync_folder(place.parent)
        return False

    # --- in views ---

    def relink(self, content: Digest, earlier: os.stat_result) -> None:
        """Relink every view from the ``earlier`` file of a content to the present one, name by name.

        Folders of the view stay, and files that a job has open remain valid. On failure the stage is marked as
        lacking files, and housekeeping stages it again.
        """
        for stage, path in self._showing(content, earlier):
            aside = self.places.views / f"{stage.record.id}.relinking"  # removed by the next start after a kill
            try:
                self.files.relink(content, aside, path)
            except (OSError, ChangedFilesError) as error:
                logger.warning(
                    "cannot link %s to the repaired file %s: %r; housekeeping stages it again", path, content, error
                )
                stage.mend_at = _ALREADY_DUE

    def mark_lacking(self, content: Digest, earlier: os.stat_result) -> None:
        """No replacement exists yet: mark stages that show the ``earlier`` file as lacking, until they are mended."""
        for stage, _ in self._showing(content, earlier):
            if stage.mend_at is None:
                stage.mend_at = _ALREADY_DUE

    def _showing(self, content: Digest, earlier: os.stat_result) -> Iterator[tuple[NodeStage, Path]]:
        for stage, path in self.staged.named(content):
            with suppress(OSError):
                if os.path.samestat(path.lstat(), earlier):
                    yield stage, path


# A chunk is rewritten in the same inode, so that views, open files and mappings of jobs heal with it. Blocking; the
# functions raise ``DiskFailedError``.


def check_writable(path: Path) -> None:
    """Checked first, so that no chunk is fetched in vain."""
    with disk_errors(path), opened(path, _AS_FOUND) as found:
        os.close(_reopened(found))


def rewrite(path: Path, chunk: PlacedChunk, buffers: BufferPool, content: memoryview) -> None:
    """Write a verified chunk in place, durably, and read it back from the disk.

    Writes through the page cache, so that mappings of the file see the right bytes at once. A kill meanwhile leaves
    the chunk wrong, as before.
    """
    with disk_errors(path):
        with _writable(path) as descriptor:
            write_all(descriptor, content, chunk.range.start)
        with buffers.take(CHUNK_SIZE) as buffer, UncachedFile(path) as file:
            count = file.read(buffer, chunk.range.start, chunk.range.size)
            is_right = count == chunk.range.size and digest_of(buffer[:count]) == chunk.digest
    if not is_right:
        raise DiskFailedError(
            str(path), f"chunk {chunk.index} was just written there, and reads back with other content"
        )


def truncate(path: Path, size: int) -> None:
    with disk_errors(path), _writable(path) as descriptor:
        os.ftruncate(descriptor, size)


def identity(path: Path) -> os.stat_result | None:
    """The file's identity; None if it does not exist. Blocking."""
    with suppress(OSError):
        return path.lstat()
    return None


@contextmanager
def _writable(path: Path) -> Iterator[int]:
    """Open the agent's read-only file for writing; syncs it and restores its times at the end.

    ``compare_view`` uses the time to distinguish a copy from a file that was written to.
    """
    with opened(path, _AS_FOUND) as found:
        descriptor = _reopened(found)
        try:
            before = os.fstat(descriptor)
            yield descriptor
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reopened(found: int) -> int:
    """Reopens the same inode, even if the name was replaced."""
    os.fchmod(found, _OURS)
    try:
        return os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.fchmod(found, _READ_ONLY)
