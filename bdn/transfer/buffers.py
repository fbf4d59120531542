"""The memory that bytes move through: a fixed number of page-aligned buffers of one chunk each.

The pool is the bound on memory: who finds it empty waits. Pages are aligned (``mmap``), so that direct I/O can use them.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from bdn.core.chunk import CHUNK_SIZE


class BufferPool:
    """``count`` buffers of ``CHUNK_SIZE`` bytes, made when first needed. Shared by threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: queue.LifoQueue[memoryview | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    @contextmanager
    def take(self, size: int) -> Iterator[memoryview]:
        """The first ``size`` bytes of a buffer, until the block ends. Blocks while all buffers are out."""
        buffer = self._free.get()
        try:
            if buffer is None:
                buffer = memoryview(mmap.mmap(-1, CHUNK_SIZE))
            yield buffer[:size]
        finally:
            self._free.put(buffer)
