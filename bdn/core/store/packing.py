"""Which files travel and rest together: a million small files is a normal dataset, and must not be a million objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.source.upstream import UpstreamFile
from bdn.core.store.seal import SEAL_SIZE

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
