"""MemoryStore keeps the contract of a CollectableStore."""

import pytest

from bdn.core.store import CollectableStore
from tests.contract.chunk_store_contract import ChunkStoreContract
from tests.support.content.memory_store import MemoryStore


class TestMemoryStore(ChunkStoreContract):
    @pytest.fixture
    def store(self) -> CollectableStore:
        return MemoryStore()
