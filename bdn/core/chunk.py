"""The unit of everything that moves: fixed, aligned pieces of at most 8 MiB, never content-defined."""

from dataclasses import dataclass
from typing import Final

CHUNK_SIZE: Final = 8 * 1024 * 1024


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
