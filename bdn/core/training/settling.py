"""When a checkpoint has settled: unchanged for long enough, or complete at once by a rename."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bdn.core.training.checkpoints import INDEX, UNFINISHED, shards_of

REST_SECONDS: Final = 5.0


class Stamp(NamedTuple):
    """What changes when a file does: size in bytes, times in ns, inode and device."""

    size: int
    mtime: int
    ctime: int
    inode: int
    device: int


class Folder(NamedTuple):
    """A folder's identity, whatever its name.

    The birth time, in ns, distinguishes it from a later folder with a reused inode.
    """

    device: int
    inode: int
    birth: int


Files = Mapping[str, Stamp]  # by path in the checkpoint


@dataclass(frozen=True, slots=True)
class _Seen:
    files: Files
    since: float
    rests_since: Mapping[str, float]
    is_renamed: bool


@dataclass
class Settling:
    """Records the result of each scan, with the time of a steady clock in seconds.

    File times are only compared for equality.

    A checkpoint settles when two scans ``settle_seconds`` apart, and all scans between, found the same. It settles at
    once when its folder is new under this name and had another name one or two scans ago: a job that writes aside and
    renames declares the checkpoint complete. (Two scans, because a folder that is renamed during a scan may be found
    under neither name.)

    The rule cannot see some renames, and such folders settle by time: moved in from elsewhere, written and renamed
    between two scans, renamed before the first scan, or on a file system without birth times, such as NFS. The folder's
    change time does not help: ``chmod``, ``rsync`` and ``tar`` set it, too, during writing. A write that changes no time
    is not seen either: through a shared mapping before the kernel notices it, or a second write within a tick of the
    kernel's clock (4 ms) after the scan.
    """

    settle_seconds: float
    rest_seconds: float = REST_SECONDS
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _last: Mapping[str, Folder] = field(default_factory=dict)
    _before: Mapping[str, Folder] = field(default_factory=dict)

    def look(self, now: float, checkpoints: Mapping[str, Files], folders: Mapping[str, Folder]) -> None:
        """Record all present checkpoints, and all folders directly below the directory, including temporary ones."""
        names = {folder: name for look in (self._before, self._last) for name, folder in look.items()}
        renamed = {name for name, folder in folders.items() if names.get(folder, name) != name}
        self._seen = {name: self._looked(now, name, files, name in renamed) for name, files in checkpoints.items()}
        self._before, self._last = self._last, dict(folders)

    def _looked(self, now: float, name: str, files: Files, is_renamed: bool) -> _Seen:
        known = self._seen.get(name)
        if known is None:
            return _Seen(dict(files), now, dict.fromkeys(files, now), is_renamed)
        if known.files == files:
            return known
        rests_since = {
            path: known.rests_since[path] if known.files.get(path) == stamp else now for path, stamp in files.items()
        }
        return _Seen(dict(files), now, rests_since, is_renamed)

    def is_settled(self, name: str, now: float) -> bool:
        """Whether the checkpoint was unchanged or renamed as of the last scan. Check ``why_incomplete``, too."""
        seen = self._seen.get(name)
        return seen is not None and (seen.is_renamed or now - seen.since >= self.settle_seconds)

    def rested(self, name: str, now: float) -> set[str]:
        """The checkpoint's files unchanged for ``rest_seconds``: their chunks may be sent ahead."""
        seen = self._seen.get(name)
        if seen is None:
            return set()
        return {path for path, since in seen.rests_since.items() if now - since >= self.rest_seconds}


def why_incomplete(
    files: Files,
    read: Callable[[str], bytes | bytearray | None],
    writing: Callable[[], Collection[tuple[int, int]]],
) -> str | None:
    """Why a checkpoint is incomplete, whatever its times; None: no reason found.

    Args:
        files: of one checkpoint.
        read: returns the content of a path that ends in ``INDEX``, or None when unreadable.
        writing: returns the files open for writing now, by device and inode. Called last.
    """
    if UNFINISHED in files:
        return f"it holds {UNFINISHED}"
    for path in files:
        if path.endswith(INDEX):
            content = read(path)
            if content is None:
                return f"{path} cannot be read"
            folder = path[: path.rfind("/") + 1]
            absent = {f"{folder}{shard}" for shard in shards_of(content)} - files.keys()
            if absent:
                return f"{path} names {min(absent)}, which is not there"
    opened = writing()
    is_open = (path for path, stamp in files.items() if (stamp.device, stamp.inode) in opened)
    return next((f"{path} is open for writing" for path in is_open), None)
