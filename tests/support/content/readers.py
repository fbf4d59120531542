"""Chunk readers to wrap: one that reads a store, and one that does what a script says."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.chunk import Digest, digest_of
from bdn.core.store import ChunkStore
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk


@dataclass(frozen=True)
class StoreReader:
    """Reads ``store`` as plainly as possible."""

    store: ChunkStore

    def read_into(self, chunk: PartialChunk) -> None:
        with self.store.open(chunk.digest) as file:
            chunk.buffer[chunk.done :] = file.read()[chunk.done :]
        chunk.received(chunk.buffer[chunk.done :])


@dataclass
class ScriptedReader:
    """Each read takes the next step: bytes to deliver, an error to raise, or both, in this order.

    ``asked`` is what was asked for, and ``starts`` how much of it was there already.
    """

    steps: list[bytes | Exception | tuple[bytes, Exception]]
    asked: list[Digest] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def read_into(self, chunk: PartialChunk) -> None:
        self.asked.append(chunk.digest)
        self.starts.append(chunk.done)
        step = self.steps.pop(0)
        content, error = (
            step if isinstance(step, tuple) else (b"", step) if isinstance(step, Exception) else (step, None)
        )
        piece = chunk.buffer[chunk.done : chunk.done + len(content)]
        piece[:] = content
        chunk.received(piece)
        if error is not None:
            raise error


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
    return read_named(reader, digest_of(content), len(content))


def read_named(reader: ChunkReader, digest: Digest, size: int) -> bytes:
    """The chunk of this name and size."""
    buffer = bytearray(b"\xee" * size)
    reader.read_into(PartialChunk(digest, memoryview(buffer)))
    return bytes(buffer)
