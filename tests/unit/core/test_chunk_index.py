from __future__ import annotations

import pytest

from bdn.core.cache.index import IN_USE_SECONDS, Admission, ChunkIndex
from bdn.core.errors import CacheFullError, CacheTooSmallError
from tests.support.content.names import named

A, B, C = named("a"), named("b"), named("c")
M, N = named("m"), named("n")


def index_with_a_chunk_of_m() -> ChunkIndex:
    """A chunk of 5 bytes, used at 100 seconds."""
    index = ChunkIndex()
    index.admit(M, A, 5, now=100.0, budget=8)
    index.commit(A)
    return index


def test_a_manifest_in_use_makes_no_room_and_the_error_says_how_much_is_in_use() -> None:
    index = index_with_a_chunk_of_m()
    with pytest.raises(CacheFullError) as full:
        index.admit(N, B, 4, now=100.0 + IN_USE_SECONDS - 0.01, budget=8)
    assert tuple(full.value.details().values())[:4] == (4, 3, 5, 8)


def test_a_manifest_makes_room_once_it_is_not_in_use_any_more() -> None:
    index = index_with_a_chunk_of_m()
    room = index.admit(N, B, 4, now=100.0 + IN_USE_SECONDS, budget=8)
    assert [(victim.manifest, victim.contents, victim.size) for victim in room.victims] == [(M, (A,), 5)]
    assert (index.ledger.committed_bytes, index.ledger.reserved_bytes) == (0, 4)


def test_a_manifest_never_makes_room_for_more_of_itself() -> None:
    index = index_with_a_chunk_of_m()
    with pytest.raises(CacheFullError):
        index.admit(M, B, 4, now=10_000.0, budget=8)


def test_what_can_never_fit_evicts_nothing() -> None:
    index = index_with_a_chunk_of_m()
    with pytest.raises(CacheTooSmallError):
        index.admit(N, B, 9, now=10_000.0, budget=8)
    assert index.committed() == (A,)


def test_a_chunk_of_two_manifests_is_counted_once_and_stays_with_either() -> None:
    index = index_with_a_chunk_of_m()
    assert index.admit(N, A, 5, now=200.0, budget=8) == Admission((), ())
    index.evict(index.plan([M]))
    assert index.named_by(A) == {N}
    assert (index.ledger.committed_bytes, index.size_of(N)) == (5, 5)


def test_a_chunk_that_was_evicted_on_its_way_is_counted_until_it_ends_and_held_by_nobody() -> None:
    index = ChunkIndex()
    index.admit(M, A, 5, now=100.0, budget=8)
    index.evict(index.plan([M]))
    assert index.ledger.reserved_bytes == 5
    assert index.commit(A) == frozenset()
    assert index.ledger.used_bytes == 0
