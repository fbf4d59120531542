"""Disk space checks before writing: the needs of a mirror and its neighbours, summed per file system."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from bdn.core.chunk import Digest
from bdn.core.errors import NoRoomError
from bdn.core.layout import Manifest
from bdn.core.units import format_size


@dataclass(frozen=True, slots=True)
class Tree:
    """Content to be written, in bytes: the sum over all paths, each known content, and the content not known yet."""

    size: int
    contents: Mapping[Digest, int]
    unknown: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        return cls(manifest.bytes_total, manifest.contents)


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that one component is about to write.

    ``room`` is its maximum after all components before it have written theirs. ``hint`` is what to do if it is too
    small.

    Sizes are bytes; ``device`` is ``st_dev`` of the file system.
    """

    what: str
    path: str
    device: int
    size: int
    room: int
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class FileSystemNeed:
    """All needs of one file system, in bytes. They fit when ``needed`` is at most ``free``."""

    needs: tuple[Need, ...]

    @property
    def needed(self) -> int:
        return sum(need.size for need in self.needs)

    @property
    def free(self) -> int:
        """Bytes available to all needs together; the need closest to its ``room`` decides."""
        return self.needed + min(need.room - need.size for need in self.needs)

    def __str__(self) -> str:
        parts = ", ".join(f"{format_size(need.size)} for {need.what} at {need.path}" for need in self.needs)
        return f"{format_size(self.needed)} are needed and {format_size(max(0, self.free))} free: {parts}"


def by_file_system(needs: Iterable[Need]) -> list[FileSystemNeed]:
    """Group needs by file system, in order of first appearance."""
    found: dict[int, tuple[Need, ...]] = {}
    for need in needs:
        found[need.device] = (*found.get(need.device, ()), need)
    return [FileSystemNeed(of_one) for of_one in found.values()]


def check_room(what: str, needs: Iterable[Need]) -> None:
    """Raise ``NoRoomError``, with figures, when a file system lacks room."""
    if full := [one for one in by_file_system(needs) if one.needed > one.free]:
        hints = [need.hint for one in full for need in one.needs if need.hint]
        raise NoRoomError(what, ". ".join(["; ".join(map(str, full)), *hints]))
