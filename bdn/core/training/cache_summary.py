"""A bounded list of a training cache's content; in a large cache each deep folder becomes one entry."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

ENTRIES_LIMIT: Final = 100_000
_CHARACTERS_LIMIT: Final = 16_000_000  # of all paths: a job may choose their lengths
FileType = Literal["file", "directory", "symlink"]
_TYPES: Final[dict[int, FileType]] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


class SummaryEntry(NamedTuple):
    """A file, folder or link by its path below the cache.

    ``mode`` is ``st_mode``, ``modified`` in seconds since the epoch.

    ``size`` is in bytes: 0 for a folder, or the sum of all files below where those are not listed.
    """

    path: str
    size: int
    modified: float
    mode: int

    @property
    def file_type(self) -> FileType | None:
        """None: a socket, a FIFO or a device."""
        return _TYPES.get(stat.S_IFMT(self.mode))

    @property
    def permissions(self) -> str:
        return stat.filemode(self.mode)


@dataclass(slots=True)
class _Kept:
    size: int
    modified: float
    mode: int


class CacheSummary:
    """Entries of a tree, added folders first; stores at most ``limit``, and at most 16 MB of paths.

    All entries down to one depth are stored and none below: the greatest depth within the limits. The order of siblings
    does not matter.
    """

    def __init__(self, limit: int = ENTRIES_LIMIT) -> None:
        self._limit = limit
        self._levels: list[dict[str, _Kept]] = []  # index 0 has the entries of depth 1
        self._count = 0
        self._characters = 0
        self._deepest: int | None = None  # deepest level stored; None: all so far
        self.files = 0
        self.size = 0  # bytes of all files, listed or not

    def __len__(self) -> int:
        return self._count

    def add(self, entry: SummaryEntry) -> None:
        """Add a file, folder or link; other types are skipped."""
        kind = entry.file_type
        if kind is None:
            return
        size = 0 if kind == "directory" else entry.size
        self.size += size
        self.files += kind != "directory"
        depth = entry.path.count("/") + 1
        if self._deepest is not None and depth > self._deepest:
            self._add_to_folder(entry.path, size)
            return
        while len(self._levels) < depth:
            self._levels.append({})
        self._levels[depth - 1][entry.path] = _Kept(size, entry.modified, entry.mode)
        self._count += 1
        self._characters += len(entry.path)
        while self._count > self._limit or self._characters > _CHARACTERS_LIMIT:
            self.fold()

    def fold(self) -> bool:
        """Drop the deepest level. Returns False when no level is left."""
        if not self._levels:
            return False
        self._deepest = len(self._levels) - 1
        gone = self._levels.pop()
        self._count -= len(gone)
        self._characters -= sum(map(len, gone))
        for path, kept in gone.items():
            self._add_to_folder(path, kept.size)
        return True

    def entries(self) -> Iterator[SummaryEntry]:
        paths = sorted((path, level) for level, kept in enumerate(self._levels) for path in kept)
        for path, level in paths:
            kept = self._levels[level][path]
            yield SummaryEntry(path, kept.size, kept.modified, kept.mode)

    def _add_to_folder(self, path: str, size: int) -> None:
        """Add ``size`` to the ancestor at the deepest stored level, if any."""
        if size and self._deepest:
            folder = self._levels[self._deepest - 1].get("/".join(path.split("/", self._deepest)[:-1]))
            if folder is not None:  # otherwise the folder appeared during the walk
                folder.size += size
