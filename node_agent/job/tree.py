"""A directory that a job writes, read without trusting it: root in the job's container changes it while we look.

Every step goes from an open folder to a name in it, and follows no link; what is opened is compared with what was seen. So nothing outside
of the directory is ever read, whatever is swapped in between two calls.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.chunk import ByteRange, UnsafePathError, normalise_path
from bdn.core.errors import DiskFailedError, LimitExceededError
from bdn.core.training.settling import Stamp

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO that was swapped in must not hold us
_DEEPEST: Final = 128  # folders; each is open while its own are looked at
_NAMED: Final = 1000  # of what is skipped


class ChangedError(Exception):
    """A file is not what was seen before: somebody writes, or it is gone."""


@dataclass
class Tree:
    """What a look found, by path below the directory. ``skipped`` names what is no file that can be pushed, as far as it is few."""

    files: dict[str, Stamp] = field(default_factory=dict)
    folders: dict[str, tuple[int, int]] = field(default_factory=dict)  # directly below the directory: device and inode
    skipped: list[str] = field(default_factory=list)

    def skip(self, path: str, why: str) -> None:
        """Name what is not pushed."""
        if len(self.skipped) < _NAMED:
            self.skipped.append(f"{path!a}: {why}")


@dataclass(frozen=True)
class JobDirectory:
    """A directory of a job. Blocking; at most ``limit`` files are taken in."""

    root: Path
    limit: int

    def look(self) -> Tree:
        """Everything below it now. What goes meanwhile is not there. ``LimitExceededError``; ``DiskFailedError`` of the directory itself."""
        tree = Tree()
        with self._opened() as root:
            self._look(tree, root, "", os.fstat(root).st_dev, 0)
        return tree

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskFailedError(str(self.root), error.strerror or str(error)) from error
        try:
            yield root
        finally:
            os.close(root)

    def _look(self, tree: Tree, folder: int, prefix: str, device: int, depth: int) -> None:
        for name in _names(folder):
            path = f"{prefix}{name}"
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if found.st_dev != device:
                    tree.skip(path, "lies on another file system")
                elif stat.S_ISDIR(found.st_mode):
                    if not depth:
                        tree.folders[name] = found.st_dev, found.st_ino
                    self._look_below(tree, folder, path, device, depth)
                elif stat.S_ISREG(found.st_mode):
                    self._add(tree, path, found)
                else:
                    tree.skip(path, "is a link" if stat.S_ISLNK(found.st_mode) else "is no file")

    def _look_below(self, tree: Tree, folder: int, path: str, device: int, depth: int) -> None:
        if depth >= _DEEPEST:
            tree.skip(path, "lies too deep")
            return
        try:
            below = os.open(path.rpartition("/")[2], _FOLDER, dir_fd=folder)
        except OSError:  # it was a folder a moment ago
            return
        try:
            if os.fstat(below).st_dev == device:
                self._look(tree, below, f"{path}/", device, depth + 1)
        finally:
            os.close(below)

    def _add(self, tree: Tree, path: str, found: os.stat_result) -> None:
        try:
            is_normal = normalise_path(path) == path
        except UnsafePathError:
            is_normal = False
        if not is_normal:
            tree.skip(path, "has no name that a manifest can hold")
            return
        tree.files[path] = _stamp(found)
        if len(tree.files) > self.limit:
            raise LimitExceededError(f"files below {self.root}", len(tree.files), self.limit)

    def read(self, path: str, stamp: Stamp, part: ByteRange, buffer: memoryview) -> None:
        """Some of a file as it was seen, into a buffer of that size. ``ChangedError`` where it is not that file any more."""
        with self._opened() as root:
            folder = root
            try:
                *folders, name = path.split("/")
                for one in folders:
                    below = os.open(one, _FOLDER, dir_fd=folder)
                    if folder != root:
                        os.close(folder)
                    folder = below
                file = os.open(name, _FILE, dir_fd=folder)
            except OSError as error:
                raise ChangedError(path) from error
            finally:
                if folder != root:
                    os.close(folder)
        try:
            self._read(file, path, stamp, part, buffer)
        finally:
            os.close(file)

    @staticmethod
    def _read(file: int, path: str, stamp: Stamp, part: ByteRange, buffer: memoryview) -> None:
        if _stamp(os.fstat(file)) != stamp:
            raise ChangedError(path)
        done = 0
        try:
            while done < part.size:
                count = os.preadv(file, [buffer[done : part.size]], part.start + done)
                if not count:
                    raise ChangedError(path)
                done += count
        except OSError as error:
            raise DiskFailedError(path, error.strerror or str(error)) from error

    def read_small(self, path: str, stamp: Stamp, limit: int) -> bytes:
        """A whole file as it was seen; nothing of one that is empty or larger than this."""
        if not 0 < stamp.size <= limit:
            return b""
        content = bytearray(stamp.size)
        self.read(path, stamp, ByteRange(0, stamp.size), memoryview(content))
        return bytes(content)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


_WRITES: Final = os.O_WRONLY | os.O_RDWR


def open_for_writing(files: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of these files, by device and inode, some process has open for writing, as far as we may look into processes. Blocking."""
    found: set[tuple[int, int]] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or is somebody else's
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    target = descriptor.stat()
                    key = target.st_dev, target.st_ino
                    if key in files and key not in found and _flags(process / "fdinfo" / descriptor.name) & _WRITES:
                        found.add(key)
    return found


def _flags(information: Path) -> int:
    """Those that a file was opened with: the line ``flags`` of proc(5) is octal."""
    for line in information.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return int(value, 8)
    return 0
