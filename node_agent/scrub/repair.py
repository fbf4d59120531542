"""Changes to damaged files: chunks rewritten in place, files made parts or quarantined, views linked to a replacement."""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, FileLayout, PlacedChunk, digest_of
from bdn.core.errors import DiskFailedError, NotFoundError
from bdn.disk.direct import UncachedFile
from bdn.disk.durable import disk_errors, sync_folder, write_all, write_durably
from bdn.transfer.byte_threads import BufferPool
from node_agent.cache.quarantine import Quarantine
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.fill.part import Bitmap
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


logger = logging.getLogger(__name__)

_READ_ONLY: Final = 0o444
_OURS: Final = 0o644
_ALREADY_DUE: Final = 0.0  # by the agent's monotonic clock


@dataclass(frozen=True)
class FileRepair:
    """Takes files out of the cache, and links views to their replacements. Blocking; methods raise ``DiskFailedError``.

    A file that is taken out stays in views that link to it: nothing is taken from a running job.
    """

    places: Places
    quarantine: Quarantine
    staged: StagedFiles

    # --- out of the cache; each returns whether a part is left ---

    def to_part(self, file: FileLayout, wrong: Collection[int]) -> bool:
        """Make the file a part that has its right chunks: the next fill goes on from there.

        It stays the same file, so that views that show it heal with that fill. One without a right chunk is deleted: its
        bytes are evidence.
        """
        place, part = self.places.file(file.digest), self.places.part(file.digest)
        with disk_errors(place):
            right = [index for index in range(len(file.chunks)) if index not in wrong]
            if not right:
                place.unlink(missing_ok=True)
                return False
            bitmap = Bitmap(len(file.chunks))
            bitmap.add(right)
            write_durably(self.places.bitmap(file.digest), bitmap.to_bytes())  # without its part it is rubbish
            place.chmod(_OURS)
            place.rename(part)
            for folder in (part.parent, place.parent):
                sync_folder(folder)
        return True

    def to_quarantine(self, content: Digest) -> bool:
        """Keep the file, so that it goes on occupying the place where the disk keeps nothing; another one is filled."""
        place = self.places.file(content)
        with disk_errors(place):
            if place.exists():
                self.quarantine.take(place)
                sync_folder(place.parent)
        return False

    # --- in views ---

    def relink(self, content: Digest, earlier: os.stat_result) -> None:
        """Let every view that links to the ``earlier`` file of a content link to the present one, name by name.

        Folders of the view stay, and so does what a job has open. A stage where that fails is marked as lacking something,
        and housekeeping stages it again.
        """
        for stage, path in self._showing(content, earlier):
            aside = self.places.views / f"{stage.record.id}.relinking"  # after a kill the next start removes it
            try:
                aside.unlink(missing_ok=True)
                aside.hardlink_to(self.places.file(content))
                aside.rename(path)
            except OSError as error:
                logger.warning("%s still shows the earlier file %s: %s", path, content, error)
                stage.mend_at = _ALREADY_DUE

    def mark_lacking(self, content: Digest, earlier: os.stat_result) -> None:
        """There is no other file yet: stages that show the ``earlier`` one lack it until they are mended."""
        for stage, _ in self._showing(content, earlier):
            if stage.mend_at is None:
                stage.mend_at = _ALREADY_DUE

    def _showing(self, content: Digest, earlier: os.stat_result) -> Iterator[tuple[NodeStage, Path]]:
        for stage, path in self.staged.named(content):
            with suppress(OSError):
                if os.path.samestat(path.lstat(), earlier):
                    yield stage, path


# A chunk is rewritten in the same file, so that views, open files and mappings of jobs heal with it. Blocking; the functions
# raise ``DiskFailedError``.


def check_writable(path: Path) -> None:
    """Whether the file can be written at all: otherwise nothing need be fetched for it."""
    with disk_errors(path), _found(path) as found:
        os.close(_reopened(found))


def rewrite(path: Path, chunk: PlacedChunk, buffers: BufferPool, content: memoryview) -> None:
    """Write a verified chunk at its place, durably, and read it back from the disk.

    Through the page cache, so that mappings of the file see the right bytes at once. A kill on the way leaves a chunk that
    is wrong, as it was.
    """
    with disk_errors(path):
        with _writable(path) as descriptor:
            write_all(descriptor, content, chunk.range.start)
        with buffers.take(CHUNK_SIZE) as buffer, UncachedFile(path) as file:
            count = file.read(buffer, chunk.range.start, chunk.range.size)
            is_right = count == chunk.range.size and digest_of(buffer[:count]) == chunk.digest
    if not is_right:
        raise DiskFailedError(str(path), f"chunk {chunk.index} is not what was just written there")


def truncate(path: Path, size: int) -> None:
    """Remove what stands beyond the end."""
    with disk_errors(path), _writable(path) as descriptor:
        os.ftruncate(descriptor, size)


def identity(path: Path) -> os.stat_result | None:
    """Which file stands there now; None when none does. Blocking."""
    with suppress(OSError):
        return path.lstat()
    return None


@contextmanager
def _writable(path: Path) -> Iterator[int]:
    """Our own file, which is read-only for everybody, open for writing; synced at the end, with its times as they were.

    A later look at a view tells a copy from a file that somebody wrote to by its time (``compare_view``).
    """
    with _found(path) as found:
        descriptor = _reopened(found)
        try:
            before = os.fstat(descriptor)
            yield descriptor
            os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _found(path: Path) -> Iterator[int]:
    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield found
    finally:
        os.close(found)


def _reopened(found: int) -> int:
    """The very file that was found, whatever stands under its name by now."""
    os.fchmod(found, _OURS)
    try:
        return os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.fchmod(found, _READ_ONLY)
