"""A manifest as a directory: built aside from the cache's files, and later compared with its contents."""

import errno
import os
import stat
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, digest_of, file_digest
from bdn.core.errors import BdnError, CanceledError
from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, opened, remove_tree
from bdn.disk.syscalls import REFUSED, clone_file, exchange
from bdn.wire.stage_schema import ViewKind
from node_agent.disk.whole_files import ChangedFilesError, WholeFiles

_PIECE: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024
_NO_LINKS: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_CLONES: Final = _NO_LINKS | {errno.ENOTTY, errno.EBADF, errno.EISDIR, errno.ETXTBSY, errno.EACCES}
_NO_KERNEL_COPY: Final = REFUSED | {errno.EXDEV, errno.EINVAL, errno.EIO}
_NO_EXCHANGE: Final = REFUSED | {errno.EINVAL}


class Placer:
    """Puts files into one tree, in the cheapest way that works between the two file systems.

    Tries hard links, if allowed, then reflinks, then copies. A way that fails for one file is not tried for the next. A
    file with as many links as its file system allows (65,000 on ext4) is copied alone.

    Copies get the time ``stamp``, in nanoseconds since the epoch, or the time of the cached file.
    """

    def __init__(self, files: WholeFiles, stop: threading.Event, *, links: bool, stamp: int | None) -> None:
        self.kind: ViewKind = "hardlink" if links else "reflink"
        self.reasons: list[str] = []
        self.changed: list[Digest] = []  # contents that were not placed, because their cached files were changed
        self._files = files
        self._stop = stop
        self._stamp = stamp
        self._too_many_links = 0

    @property
    def reason(self) -> str | None:
        """Why some files are not hard links; None if all are."""
        alone = f"{self._too_many_links} files were copied: too many links" if self._too_many_links else None
        return "; ".join([*self.reasons, *([alone] if alone else [])]) or None

    def place(self, entry: FileEntry, folder: int) -> None:
        """Raises ``OSError``, or ``CanceledError`` if ``stop`` is set."""
        try:
            if not (self.kind == "hardlink" and self._try_link(entry.digest, folder, _name_of(entry))):
                self._place_copy(entry, folder)
        except ChangedFilesError as error:
            self.changed += error.contents

    def _place_copy(self, entry: FileEntry, folder: int) -> None:
        with (
            opened(self._files.places.file(entry.digest), os.O_RDONLY) as source,
            opened(_name_of(entry), os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as target,
        ):
            if not (self.kind == "reflink" and self._try_clone(source, target)):
                _copy(source, target, self._stop)
            self._finish(source, target)
            look = partial(os.fstat, source)
            if not self._files.is_as_left(entry.digest, look(), look):  # last: it may have changed during the copy
                raise ChangedFilesError((entry.digest,))

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

    def _finish(self, source: int, target: int) -> None:
        """Make the copy durable and read-only. Its time, the stamp or the source's, reveals later writes."""
        modified = os.fstat(source).st_mtime_ns if self._stamp is None else self._stamp
        os.fchmod(target, 0o444)
        os.utime(target, ns=(modified, modified))
        os.fsync(target)


def can_clone(folder: Path, other: Path) -> bool:
    """Whether a file of ``folder`` can share blocks with a file of the other folder. Raises ``OSError``."""
    with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=other) as target:
        try:
            clone_file(source.fileno(), target.fileno())
        except OSError as error:
            if error.errno not in _NO_CLONES:
                raise
            return False
    return True


def _name_of(entry: FileEntry) -> bytes:
    return entry.path.rpartition("/")[2].encode()


def _copy(source: int, target: int, stop: threading.Event) -> None:
    left = os.fstat(source).st_size
    copy, *others = _COPIES
    while left:
        if stop.is_set():
            raise CanceledError("the copy of a view")
        try:
            count = copy(source, target, min(left, _PIECE))
        except OSError as error:
            if not others or error.errno not in _NO_KERNEL_COPY:
                raise
            copy, *others = others  # not between these file systems, or not in this sandbox
            continue
        if not count:
            raise OSError(errno.EIO, "the cached file is shorter than before")
        left -= count


def _copy_range(source: int, target: int, size: int) -> int:
    return os.copy_file_range(source, target, size)


def _send(source: int, target: int, size: int) -> int:
    return os.sendfile(target, source, None, size)


def _read_and_write(source: int, target: int, size: int) -> int:
    piece = memoryview(os.read(source, min(size, _READ_BYTES)))
    left = piece
    while left:
        left = left[os.write(target, left) :]
    return len(piece)


# Each function resumes at the position that the function before it reached.
_COPIES: Final[tuple[Callable[[int, int, int], int], ...]] = (_copy_range, _send, _read_and_write)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Built:
    """``reason``: why some files are not hard links; None if all are."""

    kind: ViewKind
    reason: str | None


def build_view(
    manifest: Manifest,
    root: Path,
    files: WholeFiles,
    stop: threading.Event,
    *,
    links: bool = True,
    stamp: int | None = None,
) -> Built:
    """Create the directory ``root``, which must be absent, with every file of a manifest. Blocking.

    Without ``links`` the directory shares no file with the cache, so writes there do not reach the cache. For ``stamp``
    see ``Placer``.

    Folders are 0755 and files 0444, whatever the umask. All calls are relative to open folders: paths as long as a
    manifest allows work below a prefix of any length, and another process cannot slip a link in. About 10 µs per linked
    file.

    Raises these errors; the caller then removes the directory:
        DiskFailedError: the disk failed.
        CanceledError: ``stop`` was set.
        ChangedFilesError: another program changed these files of the cache.
    """
    placer = Placer(files, stop, links=links, stamp=stamp)
    folders: defaultdict[str, list[FileEntry]] = defaultdict(list)
    for entry in manifest.files:
        folders[entry.path.rpartition("/")[0]].append(entry)
    with disk_errors(root):
        root.mkdir()
        with opened(root, _FOLDER) as top:
            os.fchmod(top, 0o755)
            for folder, among in folders.items():
                descriptor = open_below(top, folder)
                try:
                    for entry in among:
                        placer.place(entry, descriptor)
                finally:
                    os.close(descriptor)
        if placer.changed:
            raise ChangedFilesError(dict.fromkeys(placer.changed))
        if links:
            files.save(manifest)  # before the job can reach the files
    return Built(placer.kind, placer.reason)


def open_below(top: int, folder: str, *, makes: bool = True) -> int:
    """Open a folder, never through a link. With ``makes`` creates it and its parents as needed."""
    descriptor = os.dup(top)
    for segment in folder.encode().split(b"/") if folder else ():
        above = descriptor
        try:
            try:
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
            except FileNotFoundError:
                if not makes:
                    raise
                os.mkdir(segment, dir_fd=above)
                descriptor = os.open(segment, _FOLDER, dir_fd=above)
                os.fchmod(descriptor, 0o755)
        finally:
            os.close(above)
    return descriptor


def appear(aside: Path, place: Path, *, replaces: bool) -> None:
    """Move ``aside`` to ``place`` in one step. A directory at ``place`` moves to ``aside``, or is removed.

    Without ``replaces``, ``place`` must be absent or an empty folder. Raises ``OSError`` if another process put a file
    there.
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
        if error.errno not in _NO_EXCHANGE:
            raise
        # This file system, or this sandbox, cannot exchange: for a moment the place is empty. If another process puts
        # something there meanwhile, other than an empty folder, rename(2) fails and that stays.
        old = replaced(aside)
        place.rename(old)
        try:
            aside.rename(place)
        except OSError:
            with suppress(OSError):  # as before, unless another process has created the name
                old.rename(place)
            raise
        remove_tree(old)


def replaced(aside: Path) -> Path:
    """Path of the earlier view while its place is empty."""
    return aside.with_name(f"{aside.name}.old")


@dataclass(frozen=True, slots=True)
class Difference:
    """``lacking``: the first path that the view lacks. ``foreign``: the first file that BDN did not put there."""

    lacking: str | None
    foreign: str | None

    @property
    def is_intact(self) -> bool:
        return self.lacking is None and self.foreign is None


def remove_view(root: Path, manifest: Manifest | None, files: WholeFiles) -> None:
    """Blocking. The manifest, if still known, says which cached file each name belongs to."""
    if manifest:
        unlink_files(root, {entry.path: entry.digest for entry in manifest.files}, files)
    remove_tree(root)
    if manifest:
        save_pins(manifest, files)


def unlink_files(root: Path, contents: Mapping[str, Digest], files: WholeFiles) -> None:
    """Remove names of cached files, by path below ``root``, which may be absent. Their pins follow. Blocking."""
    if root.is_dir():
        for folder, _, names, descriptor in os.fwalk(root):
            below = folder[len(str(root)) + 1 :]
            for name in names:
                if content := contents.get(f"{below}/{name}" if below else name):
                    files.unlink(content, name, descriptor)


def save_pins(manifest: Manifest, files: WholeFiles) -> None:
    """After a failure these files are verified after the next start. Blocking."""
    with suppress(BdnError):
        files.save(manifest)


def compare_view(
    manifest: Manifest,
    root: Path,
    files: WholeFiles,
    stamp: int | None = None,
    *,
    also: Iterable[tuple[Manifest, int]] = (),
    is_skipped: Callable[[bytes], bool] = lambda _: False,
) -> Difference:
    """Compare names and files. Blocking: usually two ``stat`` calls per file. Ignores folders without files.

    Files of ``also``, manifests with their stamps, may exist, too. ``is_skipped`` is for names directly below the root.

    A file is ours if it is the cache's own unchanged inode, or a read-only file of the same size with the ``stamp`` or
    the time of the cached file. Otherwise its bytes are read, which is slow: after a forced eviction, or if the file
    was changed.
    """
    wanted = {entry.path.encode(): entry for entry in manifest.files}
    others: defaultdict[bytes, list[tuple[FileEntry, int]]] = defaultdict(list)
    for one, its_stamp in also:
        for entry in one.files:
            others[entry.path.encode()].append((entry, its_stamp))
    foreign: str | None = None
    for path, found in _files(os.fsencode(root), is_skipped=is_skipped):
        place, known = os.fsencode(root) + b"/" + path, wanted.pop(path, None)
        is_known = known is not None and is_ours(known, found, files, place, stamp)
        if not is_known and not any(is_ours(entry, found, files, place, its) for entry, its in others.get(path, ())):
            foreign = foreign or os.fsdecode(path)
    lacking = next(iter(wanted), None)
    return Difference(lacking.decode() if lacking is not None else None, foreign)


def is_ours(entry: FileEntry, found: os.stat_result, files: WholeFiles, path: bytes, stamp: int | None) -> bool:
    """Whether BDN put this file there; see ``compare_view``."""
    if not _may_be(entry, found):
        return False
    return looks_ours(entry, found, files, path, stamp) or _digest_of_file(path, entry.size) == entry.digest


def _may_be(entry: FileEntry, found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size


def looks_ours(entry: FileEntry, found: os.stat_result, files: WholeFiles, path: bytes, stamp: int | None) -> bool:
    """``is_ours`` without reading the file: also False for a file that only its bytes could prove right."""
    if not _may_be(entry, found):
        return False
    content = files.look(entry.digest)
    if content is not None and os.path.samestat(found, content):
        return files.is_as_left(entry.digest, content, partial(os.lstat, path))
    times = (stamp, content.st_mtime_ns if content is not None else None)
    return not found.st_mode & 0o222 and found.st_mtime_ns in times


def _digest_of_file(path: bytes, size: int) -> Digest:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return file_digest(size, map(digest_of, iter(lambda: file.read(CHUNK_SIZE), b"")))


def _files(
    root: bytes, prefix: bytes = b"", *, is_skipped: Callable[[bytes], bool] = lambda _: False
) -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything but folders, by path below the root. ``is_skipped`` is for names directly below the root."""
    with os.scandir(root) as entries:
        for entry in entries:
            if is_skipped(entry.name):
                continue
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, path + b"/")
            else:
                yield path, entry.stat(follow_symlinks=False)
