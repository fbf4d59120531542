"""Chunks in a dictionary: for tests, and the model of what a store is."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator
from typing import BinaryIO

from bdn.core.chunk import Buffer, Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.store import ChunkStore, StoreDisk, StoredObject


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
    """What a mirror does with a store, in memory."""

    def __init__(self) -> None:
        self._chunks: dict[Digest, bytes] = {}

    def check(self) -> None:
        """It is always there."""

    def disk(self) -> StoreDisk:
        return StoreDisk(1000, 2000, 0, "memory")

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Keep a copy."""
        self._chunks[digest] = bytes(content)

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """The chunk as a file in memory."""
        content = self._chunks.get(digest)
        if content is None:
            raise NotFoundError(f"chunk {digest}")
        return MemoryFile(content)

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        """Forget the chunks."""
        for digest in digests:
            self._chunks.pop(digest, None)

    def listed(self) -> Iterator[StoredObject]:
        """Those that were there at the beginning."""
        yield from (StoredObject(digest, len(content)) for digest, content in sorted(self._chunks.items()))

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Nothing is ever half-written here."""
        return 0, 0

    def fault(self, digest: Digest) -> str | None:
        content = self._chunks.get(digest)
        if content is None:
            return "it is absent"
        return (
            None if digest_of(content) == digest else f"its {len(content)} bytes have the digest {digest_of(content)}"
        )


def content_of(store: ChunkStore, digest: Digest) -> bytes:
    """The chunk's bytes, from any store."""
    with store.open(digest) as file:
        return file.read()
