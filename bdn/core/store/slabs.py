"""Slabs: which small files share one, who may read it, and which slabs an eviction takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.source.upstream import UpstreamFile

PUBLIC: Final = "public"  # everybody
_OWNED: Final = "organisation:"


def scope_of(organisation: str) -> str:
    """The scope of what needs an organisation's credentials."""
    return f"{_OWNED}{organisation}"


def owner_of(scope: str) -> str | None:
    """Whose the scope is; None when it is everybody's."""
    return None if scope == PUBLIC else scope.removeprefix(_OWNED)


_MAGIC: Final = b"\x00BDN slab seal\x00\x01\x00"
SEAL_SIZE: Final = len(_MAGIC) + 16  # bytes


def seal_of(scope: str) -> bytes:
    """What a slab of this scope ends in: nothing, where everybody may read it."""
    return b"" if scope == PUBLIC else _MAGIC + blake3(scope.encode()).digest(16)


def is_closed_to(organisation: str, tail: bytes) -> bool:
    """Whether a chunk that ends in these ``SEAL_SIZE`` bytes is a slab of somebody else."""
    return len(tail) == SEAL_SIZE and tail.startswith(_MAGIC) and tail != seal_of(scope_of(organisation))


SMALL_FILE_SIZE: Final = 1024 * 1024  # a file of this size or more has chunks of its own
PARCEL_FILES: Final = (
    256  # what one thread fetches one after the other; more would make a tail where an upstream is far
)


def is_small(size: int) -> bool:
    """Whether a file of so many bytes shares a slab. An empty file has no bytes that could rest anywhere."""
    return 0 < size < SMALL_FILE_SIZE


def parcels(files: Iterable[UpstreamFile]) -> Iterator[tuple[UpstreamFile, ...]]:
    """Small files in the order given, cut into parcels that become a slab each: of one scope and, with its seal, at most one chunk.

    Not sorted by size to fill slabs to the brim: neighbours are read together and evicted together.
    """
    parcel: list[UpstreamFile] = []
    size = 0
    for file in files:
        is_other = bool(parcel) and file.identity.scope != parcel[0].identity.scope
        if parcel and (is_other or size + file.size > CHUNK_SIZE - SEAL_SIZE or len(parcel) == PARCEL_FILES):
            yield tuple(parcel)
            parcel, size = [], 0
        parcel.append(file)
        size += file.size
    if parcel:
        yield tuple(parcel)


class SlabNeeds:
    """Slabs, what lies in them, and what has gone. Names are whatever the caller uses.

    Before it is asked it is told: ``add_slab`` of every slab that holds a content which may go, ``add_slice`` of everything
    in these slabs and of every other slice of those contents, ``add_scope`` and ``add_damaged`` of every slab named so far,
    ``add_whole``.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._scopes: defaultdict[str, set[str]] = defaultdict(set)
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._slabs: defaultdict[str, set[str]] = defaultdict(set)
        self._damaged: set[str] = set()
        self._whole: set[str] = set()
        self._gone: set[str] = set()  # slabs and contents

    # --- what there is ---

    def add_slab(self, slab: str, size: int) -> None:
        """A slab of ``size`` bytes."""
        self._sizes[slab] = size

    def add_scope(self, slab: str, scope: str) -> None:
        """Who may read it as a whole."""
        self._scopes[slab].add(scope)

    def add_damaged(self, slab: str) -> None:
        """The store does not hold it as its name says."""
        self._damaged.add(slab)

    def add_slice(self, content: str, slab: str) -> None:
        """The content lies in the slab."""
        if content not in self._gone and slab not in self._gone:
            self._inside[slab].add(content)
            self._slabs[content].add(slab)

    def add_whole(self, content: str) -> None:
        """The content has chunks of its own as well, none of them damaged."""
        self._whole.add(content)

    def knows(self, slab: str) -> bool:
        """Whether the slab was added."""
        return slab in self._sizes

    # --- what goes ---

    def going(self, contents: Collection[str]) -> list[str]:
        """The slabs that would go with these contents. Changes nothing."""
        leaving = frozenset(contents)
        touched = sorted({slab for content in leaving for slab in self._slabs.get(content, ())})
        dropped: set[str] = set()
        for slab in touched:
            staying = self._inside[slab] - leaving
            if not any(self._needs(content, slab, dropped) for content in staying):
                dropped.add(slab)
        return [slab for slab in touched if slab in dropped]

    def take(self, contents: Collection[str]) -> list[str]:
        """These contents go; returns the slabs that go with them."""
        dropped = self.going(contents)
        self._gone.update(contents, dropped)
        for content in contents:
            for slab in self._slabs.pop(content, ()):
                self._inside[slab].discard(content)
        for slab in dropped:
            for content in self._inside.pop(slab, ()):
                self._slabs[content].discard(slab)
        return dropped

    def size(self, slabs: Iterable[str]) -> int:
        """The bytes of these slabs together."""
        return sum(self._sizes[slab] for slab in slabs)

    def _needs(self, content: str, slab: str, dropped: AbstractSet[str]) -> bool:
        if content in self._whole:
            return False
        others = [self._scopes[other] for other in self._slabs[content] - self._damaged - dropped if other != slab]
        return not all(
            any(scope in readable or PUBLIC in readable for readable in others) for scope in self._scopes[slab]
        )
