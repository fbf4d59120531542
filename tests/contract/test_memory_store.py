"""MemoryStore keeps the contract of a CollectableStore."""

import pytest

from bdn.core.ports import CollectableStore
from bdn.store.memory import MemoryStore
from tests.contract.chunk_store_contract import ChunkStoreContract


class TestMemoryStore(ChunkStoreContract):
    @pytest.fixture
    def store(self) -> CollectableStore:
        return MemoryStore()
