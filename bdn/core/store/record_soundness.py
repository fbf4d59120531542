"""Whether what a database says of a manifest or of a file is what was written: each record carries the name that proves it."""

from __future__ import annotations

from bdn.core.chunk import chunk_count
from bdn.core.digest import EMPTY, Digest, digest_of, file_digest
from bdn.core.store.packing import is_small

_RAW = 32  # bytes of a raw digest


def manifest_fault(digest: Digest, canonical: bytes) -> str | None:
    """What is wrong with a manifest's bytes, or None."""
    actual = digest_of(canonical)
    return None if actual == digest else f"its manifest has the name {actual}"


def content_fault(digest: Digest, size: int, chunks: bytes) -> str | None:
    """What is wrong with the record of a file, or None. ``chunks`` are raw digests, none where it lies in slabs.

    Where in a slab a file lies proves itself by the file's bytes alone, and is not asked here.
    """
    if not chunks:
        fits = size == 0 if digest == EMPTY else size > 0 and is_small(size)
        return None if fits else f"the record of a file of {size} bytes has no chunks"
    if size < 0 or len(chunks) != _RAW * chunk_count(size):
        return f"the record of a file of {size} bytes has {len(chunks)} bytes of chunk names"
    names = tuple(Digest.from_bytes(chunks[start : start + _RAW]) for start in range(0, len(chunks), _RAW))
    return None if file_digest(size, names) == digest else "the chunks of a file's record do not make up the file"
