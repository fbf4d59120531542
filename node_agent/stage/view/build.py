"""A manifest as a directory: built aside from the cache's files, and compared with what stands there later."""

import errno
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, Manifest, digest_of, file_digest
from bdn.core.errors import BdnError, CanceledError
from bdn.disk.durable import disk_errors, opened, remove_tree
from bdn.disk.syscalls import clone_file, exchange
from bdn.wire.stage_schema import ViewKind
from node_agent.disk.whole_files import ChangedFilesError, WholeFiles

_PIECE: Final = 64 * 1024 * 1024
_NO_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_CLONES: Final = _NO_LINKS | {errno.ENOTTY, errno.EBADF, errno.EISDIR, errno.ETXTBSY}
_NO_KERNEL_COPY: Final = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO})


class Placer:
    """Puts files into one tree, in the cheapest way that works between these two file systems.

    Tries hard links first, where they are allowed, then reflinks, then copies, and stays with what works: what stops the first
    file stops all. A file with as many links as its file system allows (65,000 on ext4) is copied alone.
    """

    def __init__(self, files: WholeFiles, stop: threading.Event, *, links: bool) -> None:
        self.kind: ViewKind = "hardlink" if links else "reflink"
        self.reasons: list[str] = []
        self.changed: list[Digest] = []  # contents that were not placed: somebody has changed their files
        self._files = files
        self._stop = stop
        self._too_many_links = 0

    @property
    def reason(self) -> str | None:
        """Why the view is not all hard links; None when it is."""
        alone = f"{self._too_many_links} files were copied: too many links" if self._too_many_links else None
        return "; ".join([*self.reasons, *([alone] if alone else [])]) or None

    def place(self, digest: Digest, folder: int, name: bytes) -> None:
        """Let the file appear in an open folder. Raises ``OSError``, or ``CanceledError`` when ``stop`` is set."""
        try:
            if self.kind != "hardlink" or not self._try_link(digest, folder, name):
                self._place_copy(digest, folder, name)
        except ChangedFilesError as error:
            self.changed += error.contents

    def _place_copy(self, digest: Digest, folder: int, name: bytes) -> None:
        with (
            opened(self._files.places.file(digest), os.O_RDONLY) as source,
            opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as target,
        ):
            if not (self.kind == "reflink" and self._try_clone(source, target)):
                _copy(source, target, self._stop)
            self._finish(source, target)
            look = partial(os.fstat, source)
            if not self._files.is_as_left(digest, look(), look):  # afterwards: it may have changed on the way
                raise ChangedFilesError((digest,))

    def _try_link(self, digest: Digest, folder: int, name: bytes) -> bool:
        try:
            self._files.link(digest, name, folder)
        except OSError as error:
            if error.errno == errno.EMLINK:
                self._too_many_links += 1
                return False
            if error.errno not in _NO_LINKS:
                raise
            self.kind = "reflink"
            self.reasons.append(f"no hard links: {error.strerror}")
            return False
        return True

    def _try_clone(self, source: int, target: int) -> bool:
        try:
            clone_file(source, target)
        except OSError as error:
            if error.errno not in _NO_CLONES:
                raise
            self.kind = "copy"
            self.reasons.append(f"no reflinks: {error.strerror}")
            return False
        return True

    @staticmethod
    def _finish(source: int, target: int) -> None:
        """Durable, read-only, and with the source's time, by which a later look knows that nobody wrote to it."""
        times = os.fstat(source)
        os.fchmod(target, 0o444)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.fsync(target)


def _copy(source: int, target: int, stop: threading.Event) -> None:
    left = os.fstat(source).st_size
    copy: Callable[[int, int, int], int] = os.copy_file_range
    while left:
        if stop.is_set():
            raise CanceledError("the copy of a view")
        try:
            count = copy(source, target, min(left, _PIECE))
        except OSError as error:
            if copy is not os.copy_file_range or error.errno not in _NO_KERNEL_COPY:
                raise
            copy = _read_and_write  # between these file systems the kernel does not copy by itself
            continue
        if not count:
            raise OSError(errno.EIO, "the file in the cache is shorter than it was")
        left -= count


def _read_and_write(source: int, target: int, size: int) -> int:
    return os.sendfile(target, source, None, size)  # from the current position


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Built:
    """How a view was made, and why it is not all hard links where it is not."""

    kind: ViewKind
    reason: str | None


def build_view(
    manifest: Manifest, root: Path, files: WholeFiles, stop: threading.Event, *, links: bool = True
) -> Built:
    """Make the directory ``root``, which is absent, with every file of the manifest. Blocking.

    Without ``links`` it shares no file with the cache: what is written there does not reach it.

    Folders are 0755 and files 0444, whatever the umask. Everything is done relative to open folders: paths as long as a
    manifest allows work below a prefix of any length, and nobody can slip a link in between. About 10 µs per linked file.

    Raises:
        DiskFailedError: the caller removes what is there.
        CanceledError: ``stop`` was set; likewise.
        ChangedFilesError: somebody has changed these files of the cache; likewise.
    """
    folders: defaultdict[str, list[FileEntry]] = defaultdict(list)
    for entry in manifest.files:
        folders[entry.path.rpartition("/")[0]].append(entry)
    with disk_errors(root):
        placer = Placer(files, stop, links=links)
        root.mkdir()
        with opened(root, _FOLDER) as top:
            os.fchmod(top, 0o755)
            for folder, entries in folders.items():
                _place_all(placer, top, folder, entries)
        if placer.changed:
            raise ChangedFilesError(dict.fromkeys(placer.changed))
        if links:
            files.save(manifest)  # before anybody can reach the files
        return Built(placer.kind, placer.reason)


def _place_all(placer: Placer, top: int, folder: str, entries: list[FileEntry]) -> None:
    descriptor = _open_below(top, folder)
    try:
        for entry in entries:
            placer.place(entry.digest, descriptor, entry.path.rpartition("/")[2].encode())
    finally:
        os.close(descriptor)


def _open_below(top: int, folder: str) -> int:
    """Open a folder, making it and those above it as needed."""
    descriptor = os.dup(top)
    for segment in folder.encode().split(b"/") if folder else ():
        above = descriptor
        try:
            try:
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
            except FileNotFoundError:
                os.mkdir(segment, dir_fd=above)
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
                os.fchmod(descriptor, 0o755)
        finally:
            os.close(above)
    return descriptor


def appear(aside: Path, place: Path, *, replaces: bool) -> None:
    """Let what was built ``aside`` stand at ``place`` in one step. What stands there now is aside then, or gone.

    Without ``replaces`` there may be nothing or an empty folder: ``OSError`` when somebody put a file there.
    """
    try:
        aside.rename(place)
    except OSError:
        if not replaces or not place.is_dir():
            raise
    else:
        return
    try:
        exchange(aside, place)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        # This file system cannot exchange: for a moment nothing stands there.
        old = aside.with_name(f"{aside.name}.old")
        place.rename(old)
        aside.rename(place)
        remove_tree(old)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first path that the view lacks, and the first that is there and is not what we put there. None: there is none."""

    lacking: str | None
    foreign: str | None

    @property
    def is_intact(self) -> bool:
        """Every file is there, and nothing else."""
        return self.lacking is None and self.foreign is None


def remove_view(root: Path, manifest: Manifest | None, files: WholeFiles) -> None:
    """Remove a view whose manifest, if it is still known, says which file of the cache each name belongs to. Blocking."""
    if manifest and root.is_dir():
        contents = {entry.path: entry.digest for entry in manifest.files}
        for folder, _, names, descriptor in os.fwalk(root):
            below = folder[len(str(root)) + 1 :]
            for name in names:
                if content := contents.get(f"{below}/{name}" if below else name):
                    files.unlink(content, name, descriptor)
    remove_tree(root)
    if manifest:
        with suppress(BdnError):  # then these files are read again after the next start
            files.save(manifest)


def compare_view(manifest: Manifest, root: Path, files: WholeFiles) -> Difference:
    """Compare names and files. Blocking; two looks per file, as a rule. Folders without files are not looked at.

    A file is ours when it is the cache's own inode, as we left it, or a read-only copy with the same size and time. Otherwise
    the bytes decide: that is slow, and happens after an eviction by force, or when somebody changed the file.
    """
    wanted = {entry.path.encode(): entry for entry in manifest.files}
    foreign: str | None = None
    for path, found in _files(os.fsencode(root)):
        entry = wanted.pop(path, None)
        if entry is None or not _is_ours(entry, found, files, os.fsencode(root) + b"/" + path):
            foreign = foreign or os.fsdecode(path)
    lacking = next(iter(wanted), None)
    return Difference(lacking.decode() if lacking is not None else None, foreign)


def _is_ours(entry: FileEntry, found: os.stat_result, files: WholeFiles, path: bytes) -> bool:
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    try:
        content = files.places.file(entry.digest).stat()
    except FileNotFoundError:
        return _digest_of_file(path, entry.size) == entry.digest
    if os.path.samestat(found, content):
        is_right = files.is_as_left(entry.digest, content, partial(os.lstat, path))
    else:
        is_right = not found.st_mode & 0o222 and found.st_mtime_ns == content.st_mtime_ns
    return is_right or _digest_of_file(path, entry.size) == entry.digest


def _digest_of_file(path: bytes, size: int) -> Digest:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file_digest(size, map(digest_of, iter(lambda: file.read(CHUNK_SIZE), b"")))


def _files(root: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything that is not a folder, by its path below the root."""
    with os.scandir(root) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, path + b"/")
            else:
                yield path, entry.stat(follow_symlinks=False)
