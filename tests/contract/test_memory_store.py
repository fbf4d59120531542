"""MemoryStore keeps the contract of a ChunkStore."""

from __future__ import annotations

import pytest

from bdn.core.ports import ChunkStore
from bdn.store.memory import MemoryStore
from tests.contract.chunk_store_contract import ChunkStoreContract


class TestMemoryStore(ChunkStoreContract):
    @pytest.fixture
    def store(self) -> ChunkStore:
        return MemoryStore()
