"""Letting manifests into a cache: what is reserved, what is evicted for it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bdn.core.cache.index import Admission, CacheIndex, Victim
from bdn.core.digest import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError
from tests.support.content.names import named, sizes, stage

M, N, P, Q = (named(word) for word in ("M", "N", "P", "Q"))
A, B, C = named("a"), named("b"), named("c")


def held(index: CacheIndex, manifest: Digest, contents: Mapping[Digest, int], *, at: float) -> None:
    """Admit, fill and unlease."""
    index.admit(manifest, contents, stage(f"s-{manifest.hex}"), now=at, budget=10**6)
    for content in contents:
        index.commit(content)
    index.leases.end(f"s-{manifest.hex}")


def test_a_new_manifest_is_reserved_leased_and_missing() -> None:
    index = CacheIndex()
    admission = index.admit(M, sizes(a=3, b=4), stage("s"), now=1, budget=7)
    assert admission == Admission((), (A, B))
    assert (index.ledger.reserved_bytes, index.ledger.committed_bytes) == (7, 0)
    assert index.leases.holders(M) == (stage("s"),)
    assert not index.is_complete(M)


def test_a_manifest_is_complete_when_its_last_content_is_committed() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=3, b=4), stage("s"), now=1, budget=7)
    index.commit(A)
    assert not index.is_complete(M)
    index.commit(B)
    assert index.is_complete(M)


def test_content_that_is_committed_twice_counts_once() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=3, b=4), stage("s"), now=1, budget=7)
    index.commit(A)
    index.commit(A)
    assert not index.is_complete(M)
    with pytest.raises(KeyError):
        index.commit(C)


def test_a_manifest_may_be_complete_but_for_one_content() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=3, b=4), stage("s"), now=1, budget=7)
    assert not index.is_complete_but_for(M, A)
    index.commit(B)
    assert index.is_complete_but_for(M, A)
    assert not index.is_complete_but_for(M, B)  # it is there
    assert not index.is_complete_but_for(M, C)  # it is not one of its contents
    index.commit(A)
    assert not index.is_complete_but_for(M, A)
    index.lose(B)
    assert index.is_complete_but_for(M, B)
    assert not index.is_complete_but_for(N, A)


def test_a_manifest_that_is_not_held_is_not_complete() -> None:
    assert not CacheIndex().is_complete(M)


def test_a_second_stage_waits_for_the_first_ones_fill_and_reserves_nothing() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=3, b=4), stage("s1"), now=1, budget=7)
    index.commit(A)
    assert index.admit(M, sizes(a=3, b=4), stage("s2"), now=2, budget=7) == Admission((), (B,))
    assert index.ledger.used_bytes == 7


def test_shared_content_is_counted_once() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=3, b=4), at=1)
    assert index.admit(N, sizes(b=4, c=5), stage("s"), now=2, budget=12) == Admission((), (C,))
    assert index.ledger.used_bytes == 12
    assert index.named_by(B) == {M, N}
    assert index.named_by(named("unknown")) == frozenset()


def test_least_recently_used_manifests_go_until_there_is_room_and_no_further() -> None:
    index = CacheIndex()
    for at, (manifest, word) in enumerate([(M, "a"), (N, "b"), (P, "c")]):
        held(index, manifest, sizes(**{word: 4}), at=at)
    admission = index.admit(Q, sizes(d=5), stage("s"), now=9, budget=12)
    assert admission.victims == (Victim(M, (A,), 4), Victim(N, (B,), 4))
    assert index.manifests() == (P, Q)
    assert index.ledger.used_bytes == 9


def test_room_that_fits_exactly_evicts_nothing() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4), at=1)
    assert index.admit(N, sizes(b=6), stage("s"), now=2, budget=10).victims == ()


def test_a_use_protects_from_being_the_next_to_go() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4), at=1)
    held(index, N, sizes(b=4), at=2)
    index.recency.touch(M, 3)
    assert [v.manifest for v in index.admit(P, sizes(c=4), stage("s"), now=4, budget=8).victims] == [N]


def test_what_a_victim_shares_with_the_newcomer_stays_on_disk() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4, b=4), at=1)
    admission = index.admit(N, sizes(b=4, c=4), stage("s"), now=2, budget=8)
    assert admission == Admission((Victim(M, (A,), 4),), (C,))
    assert index.ledger.is_committed(B)
    assert index.named_by(B) == {N}


def test_content_that_two_victims_share_goes_with_the_second() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4, b=4), at=1)
    held(index, N, sizes(b=4, c=4), at=2)
    admission = index.admit(P, sizes(d=12), stage("s"), now=3, budget=12)
    assert admission.victims == (Victim(M, (A,), 4), Victim(N, (B, C), 8))


def test_leased_manifests_and_what_they_share_are_passed_over() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4, b=4), at=1)
    held(index, N, sizes(b=4), at=2)
    held(index, P, sizes(c=4), at=3)
    index.leases.take(N, stage("user"))
    admission = index.admit(Q, sizes(d=8), stage("s"), now=4, budget=12)
    assert admission.victims == (Victim(M, (A,), 4), Victim(P, (C,), 4))
    assert index.is_complete(N)


def test_a_manifest_does_not_go_to_make_room_for_itself() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4, b=4), at=1)
    held(index, N, sizes(c=4), at=2)
    index.lose(B)
    assert index.admit(M, sizes(a=4, b=4), stage("s"), now=3, budget=10) == Admission((Victim(N, (C,), 4),), (B,))
    assert index.manifests() == (M,)


def test_a_half_filled_manifest_that_nobody_leases_can_be_a_victim() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=3, b=4), stage("gone"), now=1, budget=10)
    index.commit(A)
    index.leases.end("gone")
    assert index.admit(N, sizes(c=10), stage("s"), now=2, budget=10).victims == (Victim(M, (A, B), 7),)
    assert index.ledger.used_bytes == index.ledger.reserved_bytes == 10


def test_a_manifest_larger_than_the_budget_can_never_fit() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=3), at=1)
    with pytest.raises(CacheTooSmallError) as caught:
        index.admit(N, sizes(b=11), stage("s"), now=2, budget=10)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (11, 10)
    assert index.manifests() == (M,)
    assert not index.leases.is_leased(N)


def test_a_manifest_that_is_larger_than_a_shrunken_budget_is_served_while_it_is_whole() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=3, b=8), at=1)
    assert index.admit(M, sizes(a=3, b=8), stage("s"), now=2, budget=5) == Admission((), ())
    index.lose(A)
    with pytest.raises(CacheTooSmallError):
        index.admit(M, sizes(a=3, b=8), stage("s"), now=3, budget=5)


def test_a_manifest_as_large_as_the_budget_fits() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=3), at=1)
    assert index.admit(N, sizes(b=10), stage("s"), now=2, budget=10).victims == (Victim(M, (A,), 3),)


def test_leased_content_leaves_no_room_and_the_error_says_how_much() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=4, b=2), stage("user"), now=1, budget=10)
    held(index, N, sizes(b=2, c=3), at=2)
    with pytest.raises(CacheFullError) as caught:
        index.admit(P, sizes(d=5), stage("s"), now=3, budget=10)
    facts = {"needed_bytes": 5, "free_bytes": 1, "leased_bytes": 6, "budget_bytes": 10}
    assert caught.value.details() == facts | {"needed_files": None, "free_files": None}


def test_a_file_system_without_inodes_is_as_full_as_one_without_bytes_and_the_error_says_how_many_files() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=1, b=1), stage("user"), now=1, budget=100)
    held(index, N, sizes(c=1), at=2)
    with pytest.raises(CacheFullError, match="2 more files do not fit now: the file system has inodes for 0") as caught:
        index.admit(P, sizes(d=1, e=0), stage("s"), now=3, budget=100, free_files=0)
    assert (caught.value.needed_files, caught.value.free_files) == (2, 0)
    assert index.manifests() == (M, N)


def test_files_are_evicted_for_their_inodes_where_those_are_short_and_bytes_are_not() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=1, b=1), at=1)
    held(index, N, sizes(c=1), at=2)
    admission = index.admit(P, sizes(d=1, e=1, f=1), stage("s"), now=3, budget=100, free_files=1)
    assert [victim.manifest for victim in admission.victims] == [M]


def test_a_refusal_changes_nothing() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=6), stage("user"), now=1, budget=10)
    held(index, N, sizes(b=3), at=2)
    with pytest.raises(CacheFullError):
        index.admit(P, sizes(c=5), stage("s"), now=3, budget=10)
    assert index.manifests() == (M, N)
    assert index.ledger.used_bytes == 9
    assert index.leases.leased() == (M,)
    assert index.named_by(C) == frozenset()


def test_free_space_is_never_negative_when_the_budget_shrank() -> None:
    index = CacheIndex()
    index.admit(M, sizes(a=8), stage("user"), now=1, budget=10)
    with pytest.raises(CacheFullError) as caught:
        index.admit(N, sizes(b=5), stage("s"), now=2, budget=5)
    assert caught.value.free_bytes == 0


def test_renewing_a_held_manifest_needs_no_room_even_when_the_cache_is_over_its_budget() -> None:
    index = CacheIndex()
    held(index, M, sizes(a=4), at=1)
    held(index, N, sizes(b=4), at=2)
    assert index.admit(N, sizes(b=4), stage("s"), now=3, budget=5) == Admission((), ())
    assert index.manifests() == (M, N)
