"""Bytes that a double serves: literal ones, or gigabytes made up on the way out in constant memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Self

# One byte more than a chunk of BDN, so that no two aligned chunks of a file are equal and none is "already held".
PERIOD = 8 * 1024 * 1024 + 1


@dataclass(frozen=True, slots=True)
class GeneratedContent:
    """``size`` bytes that ``seed`` determines. The SHA-256 costs one pass (a few seconds per GB), once per process."""

    size: int
    seed: int = 0
    declared_sha256: str = ""

    def declaring(self, sha256: str) -> Self:
        """The same bytes under a checksum that is not computed, true or not."""
        return replace(self, declared_sha256=sha256)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) in views of a shared block; nothing is copied."""
        block = memoryview(_block(self.seed))
        while start < stop:
            offset = start % PERIOD
            length = min(stop - start, PERIOD)
            yield block[offset : offset + length]
            start += length

    def read(self, start: int, stop: int) -> bytes:
        return b"".join(self.pieces(start, stop))

    @property
    def sha256(self) -> str:
        return self.declared_sha256 or _sha256(self)


Content = bytes | GeneratedContent


def size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.size


def pieces_of(content: Content, start: int, stop: int) -> Iterator[memoryview]:
    if isinstance(content, bytes):
        yield memoryview(content)[start:stop]
    else:
        yield from content.pieces(start, stop)


@lru_cache(maxsize=4)  # the same few contents are committed by test after test
def sha256_of(content: Content) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else content.sha256


def git_blob_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def lfs_pointer_of(content: Content) -> bytes:
    """What git itself stores for an LFS file."""
    lines = (
        "version https://git-lfs.github.com/spec/v1",
        f"oid sha256:{sha256_of(content)}",
        f"size {size_of(content)}",
    )
    return "".join(f"{line}\n" for line in lines).encode()


@lru_cache(maxsize=4)
def _block(seed: int) -> bytes:
    return Random(seed).randbytes(PERIOD) * 2


@lru_cache(maxsize=64)
def _sha256(content: GeneratedContent) -> str:
    hasher = hashlib.sha256()
    for piece in content.pieces(0, content.size):
        hasher.update(piece)
    return hasher.hexdigest()
