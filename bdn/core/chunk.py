"""A chunk, and its name: fixed, aligned pieces of at most 8 MiB, never content-defined, named ``b3:<64 hex>`` by BLAKE3-256."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from blake3 import blake3

CHUNK_SIZE: Final = 8 * 1024 * 1024

_HEX: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = "b3:"

# A large file's name is a hash over hashes, in BLAKE3's key derivation mode, which keeps it apart from every name of plain
# content. A prefix alone would not: somebody could upload prefix, size and digests as a small file and own the name.
_FILE_CONTEXT: Final = "bdn:file:v1"


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """The BLAKE3-256 of some bytes. ``hex`` is 64 lower-case hexadecimal digits."""

    hex: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.hex):
            msg = f"not a digest: {self.hex[:80]!r}"
            raise ValueError(msg)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``b3:<64 hex>``; anything else, upper case included, is a ``ValueError``."""
        if text.startswith(_PREFIX) and _HEX.fullmatch(text, len(_PREFIX)):
            return cls(text[len(_PREFIX) :])
        msg = f"not a digest: {text[:80]!r}; the form is b3:<64 hex>"
        raise ValueError(msg)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """From the 32 raw bytes."""
        return cls(raw.hex())

    def to_bytes(self) -> bytes:
        """The 32 raw bytes."""
        return bytes.fromhex(self.hex)

    def __str__(self) -> str:
        return f"b3:{self.hex}"

    @property
    def fanout(self) -> str:
        """``aa/bb/aabb…``: where a directory tree keeps this content."""
        return f"{self.hex[:2]}/{self.hex[2:4]}/{self.hex}"


def digest_of(content: bytes | bytearray | memoryview) -> Digest:
    """Hash content in memory. Releases the GIL for large buffers."""
    return Digest(blake3(content).hexdigest())


EMPTY: Final = digest_of(b"")


def file_digest(size: int, chunks: Iterable[Digest]) -> Digest:
    """The name of a file of ``size`` bytes, from the digests of its chunks in order.

    A file that fits one chunk is named like that chunk, so that equal bytes have one name; a larger one by a hash over
    its size and its chunk digests, so that chunks can be verified in any order and in parallel.
    """
    digests = list(chunks)
    if not digests:
        return EMPTY
    if len(digests) == 1:
        return digests[0]
    hasher = blake3(size.to_bytes(8, "big"), derive_key_context=_FILE_CONTEXT)
    for digest in digests:
        hasher.update(digest.to_bytes())
    return Digest(hasher.hexdigest())


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)``; never empty, never reversed."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            msg = f"not a byte range: [{self.start}, {self.stop})"
            raise ValueError(msg)

    @property
    def size(self) -> int:
        """Bytes in the range."""
        return self.stop - self.start


def chunk_count(size: int) -> int:
    """How many chunks a file of ``size`` bytes has; an empty file has none."""
    return -(-size // CHUNK_SIZE)


def chunk_range(size: int, index: int) -> ByteRange:
    """The bytes of chunk ``index`` of a file of ``size`` bytes; the last chunk is the short one."""
    if not 0 <= index < chunk_count(size):
        msg = f"a file of {size} bytes has no chunk {index}"
        raise ValueError(msg)
    return ByteRange(index * CHUNK_SIZE, min(size, (index + 1) * CHUNK_SIZE))
