"""DirectoryStore keeps the contract of a ChunkStore: for one process, and for two that share a directory."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from bdn.core.chunk import Buffer, Digest
from bdn.core.store import CollectableStore, StoredChunk
from bdn.store.directory import DirectoryStore
from tests.contract.chunk_store_contract import ChunkStoreContract


class TestDirectoryStore(ChunkStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> CollectableStore:
        return DirectoryStore(tmp_path / "store")


class WrittenHereReadThere:
    """Two stores in one directory, as a worker and a server have them."""

    def __init__(self, root: Path) -> None:
        self._writer, self._reader = DirectoryStore(root), DirectoryStore(root)

    def put(self, digest: Digest, content: Buffer) -> None:
        self._writer.put(digest, content)

    def open(self, digest: Digest) -> BinaryIO:
        return self._reader.open(digest)

    def keep(self, digest: Digest) -> bool:
        return self._writer.keep(digest)

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        return self._reader.stored(digests)

    def collect(self, chunk: StoredChunk) -> bool:
        return self._reader.collect(chunk)

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        return self._reader.drop_leftovers(before, dry_run=dry_run)


class TestTwoDirectoryStoresInOnePlace(ChunkStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> CollectableStore:
        return WrittenHereReadThere(tmp_path / "store")
