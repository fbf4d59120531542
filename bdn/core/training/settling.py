"""When a checkpoint has settled: nobody has changed it for long enough, or it came whole, by a rename."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Stamp(NamedTuple):
    """What changes when a file does: size in bytes, times in ns, and which file it is."""

    size: int
    mtime: int
    ctime: int
    inode: int
    device: int


Files = Mapping[str, Stamp]  # by path in the checkpoint


@dataclass
class _Seen:
    files: Files
    since: float
    is_renamed: bool


@dataclass
class Settling:
    """Is told what each look finds, with the time of a clock that never jumps, in seconds.

    A checkpoint settles when two looks ``settle_seconds`` apart, and all between them, found the same; or at once when its folder was seen
    before under another name, which was not looked at: whoever writes aside and renames says by that that it is complete. A folder
    that was moved in from elsewhere, or written and renamed between two looks, is not known for that, and has to rest like others.
    """

    settle_seconds: float
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _aside: set[tuple[int, int]] = field(default_factory=set)  # folders that were not looked at, by device and inode

    def look(
        self,
        now: float,
        checkpoints: Mapping[str, Files],
        folders: Mapping[str, tuple[int, int]],
        aside: set[tuple[int, int]],
    ) -> None:
        """All checkpoints that there are now; their folders, and those that are temporary, by device and inode."""
        for name in self._seen.keys() - checkpoints.keys():
            del self._seen[name]
        for name, files in checkpoints.items():
            known = self._seen.get(name)
            if known is None or known.files != files:
                is_renamed = known is None and folders.get(name) in self._aside
                self._seen[name] = _Seen(files, now, is_renamed)
        self._aside = set(aside)

    def is_settled(self, name: str, now: float) -> bool:
        """Whether the checkpoint, as the last look found it, is complete as far as its files tell."""
        seen = self._seen.get(name)
        return seen is not None and (seen.is_renamed or now - seen.since >= self.settle_seconds)
