"""A view inside a directory that cannot be replaced, such as a mount point.

It is built in a hidden folder there, then moved file by file.

A journal in the hidden folder names the files before the first file is moved, and is removed when the pull is recorded.
A pull that is killed in between leaves whole files and this journal: the next pull removes these files before it
begins.
"""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Final

from bdn.core.chunk import Digest, FileEntry
from bdn.core.layout import Manifest
from bdn.disk.durable import opened, remove_tree, write_durably
from node_agent.stage.view.build import open_below

HIDDEN: Final = ".bdn-stg_"  # prefix of the hidden folders' names
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
_JOURNAL: Final = "journal"
_NO_LOCKS: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
_IN_THE_WAY: Final = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST})
_IsOurs = Callable[[FileEntry, os.stat_result, bytes, int], bool]


@dataclass(frozen=True, slots=True)
class Placed:
    """Files that a pull put, or may have put, in a directory. ``stamp``: their time, in nanoseconds since the epoch."""

    manifest: Manifest
    stamp: int


@contextmanager
def claimed(root: Path) -> Iterator[None]:
    """Lock ``root`` against other pulls, if the file system supports locks on folders. Blocking.

    Raises ``BlockingIOError`` if another pull holds the lock.
    """
    with opened(root, _FOLDER) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def hidden_folder(root: Path, stage_id: str) -> Path:
    """Holds the stage's tree while it is built, and the journal."""
    return root / f".bdn-{stage_id}"


def unfinished(root: Path) -> list[Placed]:
    """What killed pulls may have left in ``root``. Blocking."""
    return [placed for folder in _hidden(root) if (placed := _noted(folder))]


def move_in(root: Path, tree: Path, manifest: Manifest, earlier: Iterable[Placed]) -> None:
    """Move a whole, synced tree from its hidden folder into ``root``, and remove files of ``earlier`` pulls. Blocking.

    Each file appears whole, in one step. The journal stays until ``finish``, or for the pull after a killed one.
    """
    name = manifest.files[0].path.rpartition("/")
    with opened(tree, _FOLDER) as source, opened(root, _FOLDER) as top:
        with _folder(source, name[0]) as folder:
            stamp = os.stat(name[2], dir_fd=folder).st_mtime_ns  # with the precision of this file system
        write_durably(tree.with_name(_JOURNAL), _journal(Placed(manifest, stamp)))
        os.fsync(top)
        coming = _by_folder(entry.path for entry in manifest.files)
        left = {entry.path for placed in earlier for entry in placed.manifest.files}
        gone = _by_folder(left - {entry.path for entry in manifest.files})
        _remove(top, gone, lambda _, found, __: stat.S_ISREG(found.st_mode))
        for below, names in coming.items():
            with _folder(source, below) as here, _folder(top, below, makes=True) as there:
                for each in names:
                    _move(each, here, there)
        _sync(top, coming)


def undo(root: Path, is_ours: _IsOurs) -> None:
    """Remove the files that unfinished pulls moved into ``root``, and their hidden folders. Idempotent. Blocking.

    ``root`` may be absent. ``is_ours`` decides from an entry, its status, its path and a stamp whether a pull put it
    there.
    """
    for folder in _hidden(root):
        if placed := _noted(folder):
            with opened(root, _FOLDER) as top:
                _remove(top, _by_folder(entry.path for entry in placed.manifest.files), _moved_by(placed, is_ours))
                os.fsync(top)
        finish(folder)


def finish(folder: Path) -> None:
    """Remove a hidden folder, journal first. The files that the journal names stay. Blocking."""
    (folder / _JOURNAL).unlink(missing_ok=True)
    remove_tree(folder)


def _moved_by(placed: Placed, is_ours: _IsOurs) -> Callable[[str, os.stat_result, bytes], bool]:
    entries = {entry.path: entry for entry in placed.manifest.files}

    def is_moved(path: str, found: os.stat_result, at: bytes) -> bool:
        return found.st_mtime_ns == placed.stamp and is_ours(entries[path], found, at, placed.stamp)

    return is_moved


def _hidden(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            found = [one for one in entries if one.name.startswith(HIDDEN) and one.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(root / entry.name for entry in found)


def _journal(placed: Placed) -> Iterator[bytes]:
    """A line for the pull, and one for each file."""
    yield _line([placed.stamp, placed.manifest.digest.hex])
    for entry in placed.manifest.files:
        yield _line([entry.path, entry.size, entry.digest.hex])


def _line(record: list[object]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _noted(folder: Path) -> Placed | None:
    try:
        with (folder / _JOURNAL).open("rb") as file:
            stamp, manifest = json.loads(file.readline())
            files = [(path, size, Digest(name)) for path, size, name in map(json.loads, file)]
        return Placed(Manifest(Digest(manifest), tuple(starmap(FileEntry, files))), int(stamp))
    except (FileNotFoundError, ValueError, TypeError):  # nothing was moved, or the folder is not ours
        return None


def _by_folder(paths: Iterable[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        below, _, name = path.rpartition("/")
        found.setdefault(below, []).append(name)
    return found


@contextmanager
def _folder(top: int, below: str, *, makes: bool = False) -> Iterator[int]:
    descriptor = open_below(top, below, makes=makes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _move(name: str, source: int, target: int) -> None:
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        _remove_empty(name, target)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


def _remove_empty(name: str, folder: int) -> None:
    """Remove a folder that contains only folders. Raises ``OSError`` if it contains anything else."""
    with opened(name, _FOLDER | os.O_NOFOLLOW, folder) as below, os.scandir(below) as entries:
        for entry in list(entries):
            _remove_empty(entry.name, below)
    os.rmdir(name, dir_fd=folder)


def _remove(top: int, names: Mapping[str, list[str]], is_wanted: Callable[[str, os.stat_result, bytes], bool]) -> None:
    """Remove files, durably and never through a link, and folders that become empty."""
    for below in sorted(names, reverse=True):  # deepest first
        with suppress(FileNotFoundError, NotADirectoryError), _folder(top, below) as folder:
            for name in names[below]:
                with suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    at = b"/proc/self/fd/%d/%s" % (folder, name.encode())
                    if is_wanted(f"{below}/{name}" if below else name, found, at):
                        os.unlink(name, dir_fd=folder)
            os.fsync(folder)
    for below in _deepest_first(names):
        parent, _, name = below.rpartition("/")
        with suppress(OSError), _folder(top, parent) as folder:  # not empty
            os.rmdir(name, dir_fd=folder)


def _deepest_first(folders: Iterable[str]) -> list[str]:
    parts = (below.split("/") for below in folders if below)
    return sorted({"/".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}, reverse=True)


def _sync(top: int, names: Mapping[str, list[str]]) -> None:
    for below in _deepest_first(names):
        with _folder(top, below) as folder:
            os.fsync(folder)
    os.fsync(top)
