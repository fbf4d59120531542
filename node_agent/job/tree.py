"""Reads a job's directory without trusting it: root in the job's container may change it during a scan.

Every step opens a name relative to an open folder without following links, and compares the result with the scan. So
nothing outside the directory is ever read, whatever the job swaps in between two calls.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final

from blake3 import blake3

from bdn.core.chunk import ByteRange, Digest, UnsafePathError, normalise_path
from bdn.core.errors import DiskFailedError, LimitExceededError
from bdn.core.training.checkpoints import is_looked_at
from bdn.core.training.settling import Folder, Stamp
from bdn.disk.durable import disk_errors, opened
from bdn.disk.syscalls import birth_time, sync_file_system
from node_agent.disk.group_sync import FEW, is_trusted

_ROOT: Final = os.O_RDONLY | os.O_DIRECTORY  # the agent's own path, which may contain links
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NAME: Final = os.O_PATH | os.O_NOFOLLOW  # does not open the object: no side effect on a swapped-in FIFO or device
# The scanned object is gone or has another type; ESTALE is how network file systems report that it is gone.
_SWAPPED: Final = frozenset({errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_DEEPEST: Final = 128  # folders; each stays open while its children are scanned
FILES_LIMIT: Final = 1_000_000
_NAMED: Final = 1000  # skipped paths that are recorded
_MOST_LINKS: Final = 40  # length of a chain of links, as in path_resolution(7)


@dataclass
class JobTree:
    """The result of a scan, by path below the directory. ``skipped`` contains the first thousand reasons."""

    files: dict[str, Stamp] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # uninterpreted text of the link
    targets: dict[str, str] = field(default_factory=dict)  # link path → path of the file
    folders: dict[str, Folder] = field(default_factory=dict)  # top-level folders on file systems with birth times
    skipped: dict[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)  # paths that may become readable; not bounded like ``skipped``
    entries: int = 0

    def skip(self, path: str, why: str) -> None:
        if len(self.skipped) < _NAMED:
            self.skipped[path] = why


class ChangedError(Exception):
    """The job changed or removed the file since the scan."""


@dataclass(frozen=True)
class OpenFile:
    """An open file of a job.

    Blocking; methods raise ``ChangedError`` if it changed since the scan, and ``DiskFailedError``.
    """

    path: str
    descriptor: int
    stamp: Stamp

    def digest_of(self, part: ByteRange, buffer: memoryview) -> Digest:
        """Digest of a range, read piece by piece through ``buffer``."""
        hasher = blake3()
        for start in range(part.start, part.stop, len(buffer)):
            piece = buffer[: min(len(buffer), part.stop - start)]
            self.read(start, piece)
            hasher.update(piece)
        return Digest(hasher.hexdigest())

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from offset ``start``. If this raises, the buffer's content is undefined."""
        done = 0
        while done < len(buffer):
            with _errors_of(self.path):
                count = os.preadv(self.descriptor, [buffer[done:]], start + done)
            if not count:
                raise ChangedError(self.path)
            done += count
        self.check()

    def check(self) -> None:
        with _errors_of(self.path):
            if not _is_still(self.descriptor, self.stamp):
                raise ChangedError(self.path)


@dataclass(frozen=True)
class JobDirectory:
    """A job's directory. Blocking. A scan of more than ``limit`` names of files, folders and anything else fails.

    ``walks`` bounds the descriptors over all directories that share it: a walk holds one for each nested folder.
    """

    root: Path
    limit: int = FILES_LIMIT
    walks: AbstractContextManager[object] = field(default_factory=Lock)

    def look(self) -> JobTree:
        """Scan everything except the content of temporary folders. Skips entries deleted during the scan.

        Raises ``LimitExceededError``, and ``DiskFailedError`` for the directory itself.
        """
        tree = JobTree()
        with self.walks, disk_errors(self.root), opened(self.root, _ROOT) as root:
            self._look(tree, root, "", os.fstat(root).st_dev, 0)
        for path in tree.links:
            _follow(tree, path)
        return tree

    def _look(self, tree: JobTree, folder: int, prefix: str, device: int, depth: int) -> None:
        for name in self._names(tree, folder):
            path = f"{prefix}{name}"
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if found.st_dev != device:
                    tree.skip(path, "is on another file system")
                elif stat.S_ISDIR(found.st_mode):
                    self._look_below(tree, folder, path, device, depth)
                elif stat.S_ISREG(found.st_mode):
                    _put(tree, path, _stamp(found))
                elif stat.S_ISLNK(found.st_mode):
                    tree.links[path] = os.readlink(name, dir_fd=folder)
                else:
                    tree.skip(path, "is not a file")
            except OSError as error:
                if error.errno not in _SWAPPED:
                    tree.skip(path, f"cannot be read: {error.strerror}")
                    tree.unreadable.add(path)

    def _look_below(self, tree: JobTree, folder: int, path: str, device: int, depth: int) -> None:
        name = path.rpartition("/")[2]
        if depth >= _DEEPEST:
            tree.skip(path, "is nested too deep")
            return
        with opened(name, _FOLDER, folder) as below:
            found = os.fstat(below)
            if found.st_dev != device:
                return
            if not depth and (birth := birth_time(below)) is not None:
                tree.folders[name] = Folder(found.st_dev, found.st_ino, birth)
            if depth or is_looked_at(name):
                self._look(tree, below, f"{path}/", device, depth + 1)

    def _names(self, tree: JobTree, folder: int) -> list[str]:
        names: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                tree.entries += 1
                if tree.entries > self.limit:
                    raise LimitExceededError(f"files below {self.root}", tree.entries, self.limit)
        return sorted(names)

    @contextmanager
    def opened(self, path: str, stamp: Stamp) -> Iterator[OpenFile]:
        """Open a scanned file. Folders on the way are not kept open. Raises ``ChangedError``, ``DiskFailedError``."""
        with _errors_of(path), ExitStack() as way:
            found = self._open(way, path, stamp, keeps_way=False)
            if found is None:
                raise ChangedError(path)
            descriptor = os.dup(found[-1])
        try:
            yield OpenFile(path, descriptor, stamp)
        finally:
            os.close(descriptor)

    def read_part(self, path: str, stamp: Stamp, part: ByteRange) -> bytearray | None:
        """Read a range of a scanned file. Returns None if the file changed. Raises ``DiskFailedError``."""
        content = bytearray(part.size)
        try:
            with self.opened(path, stamp) as file:
                file.read(part.start, memoryview(content))
        except ChangedError:
            return None
        return content

    def make_durable(self, files: Mapping[str, Stamp]) -> bool:
        """Sync the scanned files and their names to disk. Returns False if one changed. Raises ``DiskFailedError``."""
        with self.walks, disk_errors(self.root), opened(self.root, _ROOT) as root:
            if len(files) >= FEW and is_trusted(root) and sync_file_system(root):
                return True
        for path, stamp in files.items():
            with _errors_of(path), ExitStack() as stack:
                found = self._open(stack, path, stamp, keeps_way=True)
                if found is None:
                    return False
                for descriptor in reversed(found):
                    os.fsync(descriptor)
        return True

    def _open(self, stack: ExitStack, path: str, stamp: Stamp, *, keeps_way: bool) -> list[int] | None:
        """Descriptors of the directory, each folder on the way, and the file. None if the file changed.

        Raises ``OSError``. Without ``keeps_way``, a folder is closed once its child is open, and only the last
        descriptor, the file's, is valid.
        """
        try:
            found = [stack.enter_context(opened(self.root, _ROOT))]
            *folders, name = path.split("/")
            for one in folders:
                with ExitStack() if keeps_way else stack.pop_all():
                    found.append(stack.enter_context(opened(one, _FOLDER, found[-1])))
            place = stack.enter_context(opened(name, _NAME, found[-1]))
            if not _is_still(place, stamp):
                return None
            # Reopens the checked inode, even if the name was swapped.
            return [*found, stack.enter_context(opened(f"/proc/self/fd/{place}", os.O_RDONLY))]
        except OSError as error:
            if error.errno in _SWAPPED:
                return None
            raise

    def read_small(self, path: str, stamp: Stamp, limit: int) -> bytes | bytearray | None:
        """Read a scanned file; ``b""`` if empty or above ``limit``. Returns None if the file changed."""
        return self.read_part(path, stamp, ByteRange(0, stamp.size)) if 0 < stamp.size <= limit else b""


@contextmanager
def _errors_of(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskFailedError(path, error.strerror or str(error)) from error


def _put(tree: JobTree, path: str, stamp: Stamp) -> None:
    try:
        is_normal = normalise_path(path) == path
    except UnsafePathError:
        is_normal = False
    if is_normal:
        tree.files[path] = stamp
    else:
        tree.skip(path, "has a name that a manifest cannot contain")


def _follow(tree: JobTree, path: str) -> None:
    """Replace a link to a file below the directory by the file, from the scan alone: no link is opened."""
    at, text = path, ""
    for _ in range(_MOST_LINKS):
        text, parts = tree.links[at], at.split("/")[:-1]
        for part in text.split("/"):
            if "/".join(parts) in tree.links:
                tree.skip(path, "is a link that leads through another link")
                return
            if part == ".." and parts:
                parts.pop()
            elif part == ".." or text.startswith("/"):
                tree.skip(path, "is a link that leads out of the directory")
                return
            elif part not in ("", "."):
                parts.append(part)
        at = "/".join(parts)
        if at not in tree.links:
            break
    if at not in tree.files or at in tree.targets:
        tree.skip(path, f"is a link to {text!a:.{_NAMED}}, which is not a file in the directory")
        return
    _put(tree, path, tree.files[at])
    if path in tree.files:
        tree.targets[path] = at


def _is_still(file: int, stamp: Stamp) -> bool:
    found = os.fstat(file)
    return stat.S_ISREG(found.st_mode) and _stamp(found) == stamp


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


_WRITES: Final = os.O_WRONLY | os.O_RDWR


def open_for_writing(files: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The files, by device and inode, that a process has open for writing. Blocking.

    Sees only processes the agent may inspect.
    """
    found: set[tuple[int, int]] = set()
    processes: list[Path] = []
    with suppress(OSError):  # a sandbox without /proc
        processes += Path("/proc").iterdir()
    for process in processes:
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    target = descriptor.stat()
                    key = target.st_dev, target.st_ino
                    if key in files and key not in found and _flags(process / "fdinfo" / descriptor.name) & _WRITES:
                        found.add(key)
    return found


def _flags(information: Path) -> int:
    """The flags of open(2): the line ``flags`` of proc(5) is octal."""
    for line in information.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8)
    return 0
