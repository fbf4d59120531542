"""Tables of digests behave like dictionaries, and an agent holds chunks in few bytes."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.cache.digest_table import DigestTable
from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout
from node_agent.cache.held_chunks import HeldChunks
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from tests.support.agent.cache import a_tier, a_tier_of_chunks
from tests.support.content.layouts import held_of
from tests.support.content.names import named

# Few, all in one bucket until there are many more, and such that one stands across two others.
DIGESTS = [
    *(Digest.from_bytes(bytes([number]) * 32) for number in range(3)),
    Digest.from_bytes(b"\1" * 16 + b"\0" * 16),
]
MORE = [named(str(number)) for number in range(300)]
CHUNKS = 10_000


@given(st.lists(st.tuples(st.sampled_from(DIGESTS), st.integers(0, 255) | st.none())), st.integers(0, len(MORE)))
def test_a_table_of_digests_is_a_dictionary(steps: list[tuple[Digest, int | None]], others: int) -> None:
    table, model = DigestTable(width=1), dict[Digest, int]()
    for number, digest in enumerate(MORE[:others]):
        table[digest] = model[digest] = number % 256
    for digest, value in steps:
        if value is None:
            assert table.pop(digest, None) == model.pop(digest, None)
        else:
            table[digest] = model[digest] = value
        assert [table.get(one) for one in DIGESTS] == [model.get(one) for one in DIGESTS]
    assert (len(table), dict(table)) == (len(model), model)
    assert [one in table for one in (*DIGESTS, *MORE)] == [one in model for one in (*DIGESTS, *MORE)]


def held_in_files(folder: Path) -> object:
    chunks = [tuple(named(f"{file} {index}") for index in range(1000)) for file in range(CHUNKS // 1000)]
    layouts = [FileLayout.of(len(one) * CHUNK_SIZE, one) for one in chunks]
    held = HeldChunks(WholeFiles(Places(folder)), CacheIndex(), a_tier(folder), lambda _: None)
    held.add(held_of({str(number): one for number, one in enumerate(layouts)}))
    return held


def held_for_peers(_: Path) -> object:
    return a_tier_of_chunks(named("manifest"), {named(str(number)): CHUNK_SIZE - number for number in range(CHUNKS)})


@pytest.mark.parametrize("hold", [held_in_files, held_for_peers])
def test_a_chunk_that_is_held_takes_at_most_120_bytes_of_memory(hold: Callable[[Path], object], tmp_path: Path) -> None:
    tracemalloc.start()
    held = hold(tmp_path)
    gc.collect()
    assert held
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / CHUNKS <= 120
