"""Chunks in a dictionary: for tests, and the model of what a store is."""

from __future__ import annotations

import io
import threading
from typing import BinaryIO

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.ports import Buffer


class MemoryStore:
    """A ``ChunkStore`` that forgets everything with the process."""

    def __init__(self) -> None:
        self._chunks: dict[Digest, bytes] = {}
        self._lock = threading.Lock()

    def put(self, digest: Digest, content: Buffer) -> None:
        """Keep a copy."""
        with self._lock:
            self._chunks.setdefault(digest, bytes(content))

    def open(self, digest: Digest) -> BinaryIO:
        """The chunk as a file in memory."""
        with self._lock:
            content = self._chunks.get(digest)
        if content is None:
            raise NotFoundError(f"chunk {digest}")
        return io.BytesIO(content)

    def delete(self, digest: Digest) -> None:
        """Forget the chunk."""
        with self._lock:
            self._chunks.pop(digest, None)
