"""Which folders of a repository have to be asked for, when only paths with certain beginnings are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NO_SEGMENTS = {"", ".", ".."}  # no normalised path has them


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, ``""`` for the root. With ``stems`` only what begins with one of them in it, otherwise everything below."""

    path: str
    stems: tuple[str, ...]

    def wants(self, path: str) -> bool:
        """Whether this path in the folder, or below it, begins as it should."""
        below = f"{self.path}/" if self.path else ""
        return path.startswith(below) and (not self.stems or path[len(below) :].startswith(self.stems))

    def holds(self, path: str) -> bool:
        """Whether this path is directly in the folder, not deeper."""
        return path.rpartition("/")[0] == self.path


def folders_of(within: Sequence[str]) -> tuple[Folder, ...]:
    """Every path that begins with one of ``within`` is wanted by exactly one of these."""
    stems: dict[str, list[str]] = {}
    for prefix in within:
        folder, _, stem = prefix.rpartition("/")
        if not prefix.startswith("/") and (not folder or not _NO_SEGMENTS.intersection(folder.split("/"))):
            stems.setdefault(folder, []).append(stem)
    return tuple(Folder(path, () if "" in found else tuple(found)) for path, found in stems.items())


def nearest_above(folders: Sequence[Folder]) -> str:
    """The folder that holds all of them."""
    first, last = (found(folder.path.split("/") for folder in folders) for found in (min, max))
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return "/".join(first[:shared])
