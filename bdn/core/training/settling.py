"""When a checkpoint has settled: nobody has changed it for long enough, or it came whole, by a rename."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bdn.core.training.checkpoints import INDEX, UNFINISHED, shards_of

REST_SECONDS: Final = 5.0


class Stamp(NamedTuple):
    """What changes when a file does: size in bytes, times in ns, and which file it is."""

    size: int
    mtime: int
    ctime: int
    inode: int
    device: int


class Folder(NamedTuple):
    """Which folder it is, whatever its name. The time of its birth, in ns, tells it from one that got a free inode's number."""

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
    """Is told what each look finds, with the time of a clock that never jumps, in seconds. Times of files are compared, never reckoned with.

    A checkpoint settles when two looks ``settle_seconds`` apart, and all between them, found the same; or at once when its folder, which the
    look before did not find under this name, was seen under another name one or two looks ago: whoever writes aside and renames
    says by that that it is complete. (Two, because a folder that is renamed during a look may be found under neither name.)

    What this rule cannot see has to rest like others: a folder that was moved in from elsewhere, that was written and renamed between two looks, that was
    renamed before the first look, or that lies on a file system without times of birth, as NFS. The change time of a folder
    tells no more: ``chmod``, ``rsync`` and ``tar`` set it, too, while they go on writing. Nor is a write seen that changes no time: one through a
    shared mapping before the kernel notices it, and a second one within a tick of the kernel's clock (4 ms) after the look.
    """

    settle_seconds: float
    rest_seconds: float = REST_SECONDS
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _last: Mapping[str, Folder] = field(default_factory=dict)
    _before: Mapping[str, Folder] = field(default_factory=dict)

    def look(self, now: float, checkpoints: Mapping[str, Files], folders: Mapping[str, Folder]) -> None:
        """All checkpoints that there are now, and all folders directly below the directory, also those that are temporary."""
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
        """Whether the checkpoint, as the last look found it, has rested or came whole. ``why_incomplete`` is the other half."""
        seen = self._seen.get(name)
        return seen is not None and (seen.is_renamed or now - seen.since >= self.settle_seconds)

    def rested(self, name: str, now: float) -> set[str]:
        """The files of a checkpoint that have not changed for ``rest_seconds``: their chunks may be sent ahead."""
        seen = self._seen.get(name)
        if seen is None:
            return set()
        return {path for path, since in seen.rests_since.items() if now - since >= self.rest_seconds}


def why_incomplete(
    files: Files,
    read: Callable[[str], bytes | bytearray | None],
    writing: Callable[[], Collection[tuple[int, int]]],
) -> str | None:
    """Why more will come, whatever the times say; None: nothing says so.

    Args:
        files: of one checkpoint.
        read: gives the content of one that ends in ``INDEX``, by path; None of one that cannot be read.
        writing: gives the files that somebody has open for writing now, by device and inode. It is asked last.
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
