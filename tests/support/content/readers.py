"""Chunk readers to wrap: one that reads a store, and one that does what a script says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.digest import Digest, digest_of
from bdn.core.ports import ChunkReader, ChunkStore, OnBytes


@dataclass(frozen=True)
class StoreReader:
    """Reads ``store`` as plainly as possible."""

    store: ChunkStore

    def read_into(self, digest: Digest, buffer: memoryview, on_bytes: OnBytes | None = None) -> None:
        with self.store.open(digest) as file:
            buffer[:] = file.read()
        if on_bytes is not None:
            on_bytes(buffer)


@dataclass
class ScriptedReader:
    """Each read takes the next step: bytes to deliver, or an error to raise."""

    steps: list[bytes | Exception]
    asked: list[Digest] = field(default_factory=list)

    def read_into(self, digest: Digest, buffer: memoryview, on_bytes: OnBytes | None = None) -> None:
        self.asked.append(digest)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        buffer[:] = step
        if on_bytes is not None:
            on_bytes(buffer)


class CountedWaits(threading.Event):
    """An event on which nobody sleeps: it notes how long each one would have. ``on_wait`` is called meanwhile."""

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self._on_wait()
        return self.is_set()


def read_chunk(reader: ChunkReader, content: bytes) -> bytes:
    """The chunk that has this content, read into a buffer that held other bytes."""
    buffer = bytearray(b"\xee" * len(content))
    reader.read_into(digest_of(content), memoryview(buffer))
    return bytes(buffer)
