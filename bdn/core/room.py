"""Whether what is about to be written fits: the needs of a mirror and of what rests beside it, added up for each file system."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from bdn.core.chunk import Digest
from bdn.core.errors import NoRoomError
from bdn.core.layout import Manifest
from bdn.core.units import format_size


@dataclass(frozen=True, slots=True)
class Tree:
    """What comes, in bytes: of all paths together, of each content that is known, and of those that are not known yet."""

    size: int
    contents: Mapping[Digest, int]
    unknown: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """All of it is known."""
        return cls(manifest.bytes_total, manifest.contents)


@dataclass(frozen=True, slots=True)
class Need:
    """What one part is about to write. ``room`` is the most that it may, once all parts before it have written theirs.

    Sizes are bytes; ``device`` is the file system, as ``stat`` tells it.
    """

    what: str
    path: str
    device: int
    size: int
    room: int


@dataclass(frozen=True, slots=True)
class FileSystemNeed:
    """The needs of one file system together. It fits when no more is ``needed`` than is ``free``, in bytes."""

    needs: tuple[Need, ...]

    @property
    def needed(self) -> int:
        """All parts."""
        return sum(need.size for need in self.needs)

    @property
    def free(self) -> int:
        """What there is for them: the part that is nearest to its bounds says how much more, or less."""
        return self.needed + min(need.room - need.size for need in self.needs)

    def __str__(self) -> str:
        parts = ", ".join(f"{format_size(need.size)} for {need.what} at {need.path}" for need in self.needs)
        return f"{format_size(self.needed)} are needed and {format_size(max(0, self.free))} free: {parts}"


def by_file_system(needs: Iterable[Need]) -> list[FileSystemNeed]:
    """In the order in which file systems are named first."""
    found: dict[int, tuple[Need, ...]] = {}
    for need in needs:
        found[need.device] = (*found.get(need.device, ()), need)
    return [FileSystemNeed(of_one) for of_one in found.values()]


def check_room(what: str, needs: Iterable[Need]) -> None:
    """Raises ``NoRoomError`` with the figures of each file system where they do not fit."""
    if full := [one for one in by_file_system(needs) if one.needed > one.free]:
        raise NoRoomError(what, "; ".join(map(str, full)))
