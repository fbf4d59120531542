"""Chunks in a dictionary: for tests, and the model of what a store is."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from bdn.core.chunk import Buffer, Digest
from bdn.core.errors import NotFoundError
from bdn.core.store import ChunkStore, StoredChunk, StoreDisk


class MemoryFile(io.BytesIO):
    """A file in memory with a descriptor, as the data plane needs one to send from."""

    _descriptor = -1

    def fileno(self) -> int:
        if self._descriptor < 0:
            self._descriptor = os.memfd_create("content")
            os.write(self._descriptor, self.getbuffer())
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


class MemoryStore:
    """A ``CollectableStore`` that forgets everything with the process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._chunks: dict[Digest, bytes] = {}
        self._kept_at: dict[Digest, float] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """It is always there."""

    def disk(self) -> StoreDisk:
        return StoreDisk(1000, 2000, 0, "memory")

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Keep a copy."""
        with self._lock:
            self._chunks.setdefault(digest, bytes(content))
            self._kept_at[digest] = self._clock()

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """The chunk as a file in memory."""
        with self._lock:
            content = self._chunks.get(digest)
        if content is None:
            raise NotFoundError(f"chunk {digest}")
        return MemoryFile(content)

    def keep(self, digests: Sequence[Digest]) -> set[Digest]:
        """Remember that they were asked for."""
        with self._lock:
            held = self._chunks.keys() & set(digests)
            self._kept_at |= dict.fromkeys(held, self._clock())
            return held

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        """Those that were there at the beginning."""
        with self._lock:
            wanted = sorted(self._chunks) if digests is None else self._chunks.keys() & set(digests)
            found = [StoredChunk(digest, len(self._chunks[digest]), self._kept_at[digest]) for digest in wanted]
        yield from found

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """Forget the chunks."""
        with self._lock:
            as_seen = [chunk for chunk in chunks if self._kept_at.get(chunk.digest) == chunk.kept_at]
            for chunk in as_seen:
                del self._chunks[chunk.digest], self._kept_at[chunk.digest]
            return as_seen

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Nothing is ever half-written here."""
        return 0, 0


def content_of(store: ChunkStore, digest: Digest) -> bytes:
    """The chunk's bytes, from any store."""
    with store.open(digest) as file:
        return file.read()
