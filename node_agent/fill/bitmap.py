"""Which chunks of a file in progress are durable: one bit each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Self

_MAGIC: Final = b"bdnbits1"
_HEADER_SIZE: Final = 16


class Bitmap:
    """A set of chunk indices below ``count``, with a form on disk: 8 bytes of magic, the count, then the bits.

    A torn write does no harm: bits only ever go from 0 to 1, after their chunk was synced, and are checked when a fill
    goes on.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._bits = bytearray(-(-count // 8))

    @classmethod
    def parse(cls, content: bytes, count: int) -> Self:
        """From its form on disk; empty when that belongs to something else."""
        bitmap = cls(count)
        if content.startswith(bitmap._header()) and len(content) == _HEADER_SIZE + len(bitmap._bits):
            bitmap._bits[:] = content[_HEADER_SIZE:]
        return bitmap

    def to_bytes(self) -> bytes:
        """Its form on disk."""
        return self._header() + self._bits

    def __contains__(self, index: int) -> bool:
        return bool(self._bits[index >> 3] & 1 << (index & 7))

    @property
    def is_empty(self) -> bool:
        """Whether no chunk is durable yet."""
        return not any(self._bits)

    def add(self, indices: Iterable[int]) -> None:
        """These chunks are durable now."""
        for index in indices:
            self._bits[index >> 3] |= 1 << (index & 7)

    def _header(self) -> bytes:
        return _MAGIC + self.count.to_bytes(8, "big")
