"""Taking manifests out of a cache, losing content, and starting again from the disk."""

from __future__ import annotations

import pytest

from bdn.core.cache.index import Admission, CacheIndex, EvictionPlan, Leased, Victim
from tests.support.content.names import named, sizes, stage

M, N, P = (named(word) for word in ("M", "N", "P"))
A, B, C, D = (named(word) for word in "abcd")


def three_manifests() -> CacheIndex:
    """M (a 1, b 2), N (b 2, c 4), P (d 8), whole, used in this order."""
    index = CacheIndex()
    for at, (manifest, contents) in enumerate([(M, sizes(a=1, b=2)), (N, sizes(b=2, c=4)), (P, sizes(d=8))]):
        index.restore(manifest, contents, dict.fromkeys(contents, True), last_used=at)
    return index


def test_a_plan_takes_what_no_remaining_manifest_names() -> None:
    index = three_manifests()
    assert index.plan([M]) == EvictionPlan((Victim(M, (A,), 1),), ())
    assert index.plan([M, N]).victims == (Victim(M, (A,), 1), Victim(N, (B, C), 6))
    assert index.plan([N, M]).victims == (Victim(N, (C,), 4), Victim(M, (A, B), 3))
    assert index.plan([N, M]).size == 7


def test_a_plan_changes_nothing() -> None:
    index = three_manifests()
    index.plan([M, N, P], force=True)
    index.plan_lru(100, force=True)
    assert index.manifests() == (M, N, P)
    assert index.ledger.used_bytes == 15


def test_unknown_manifests_and_repetitions_are_passed_over() -> None:
    index = three_manifests()
    assert index.plan([P, named("unknown"), P]) == EvictionPlan((Victim(P, (D,), 8),), ())
    assert index.plan([]) == EvictionPlan((), ())
    assert index.plan([]).size == 0


def test_leased_manifests_are_refused_with_their_holders_and_protect_what_they_share() -> None:
    index = three_manifests()
    index.leases.take(N, stage("s1"))
    index.leases.take(N, stage("s2"))
    assert index.plan([M, N, P]) == EvictionPlan(
        (Victim(M, (A,), 1), Victim(P, (D,), 8)), (Leased(N, (stage("s1"), stage("s2"))),)
    )


def test_force_takes_leased_manifests_and_names_whose_leases_break() -> None:
    index = three_manifests()
    index.leases.take(N, stage("s"))
    plan = index.plan([N], force=True)
    assert plan == EvictionPlan((Victim(N, (C,), 4, (stage("s"),)),), ())
    index.evict(plan)
    assert index.manifests() == (M, P)
    assert not index.leases.is_leased(N)


def test_breaking_one_lease_of_a_stage_ends_the_stage() -> None:
    index = three_manifests()
    index.leases.take(N, stage("s"))
    index.leases.take(P, stage("s"))
    index.evict(index.plan([N], force=True))
    assert index.leases.leased() == ()


def test_an_eviction_frees_space_and_forgets_names() -> None:
    index = three_manifests()
    index.evict(index.plan([M, P]))
    assert index.manifests() == (N,)
    assert index.ledger.used_bytes == 6
    assert index.named_by(A) == index.named_by(D) == frozenset()
    assert index.named_by(B) == {N}
    with pytest.raises(KeyError):
        index.contents_of(M)


@pytest.mark.parametrize(
    ("size", "manifests"), [(0, []), (1, [M]), (2, [M, N]), (7, [M, N]), (8, [M, N, P]), (99, [M, N, P])]
)
def test_lru_takes_the_oldest_until_enough_is_freed(size: int, manifests: list[object]) -> None:
    assert [victim.manifest for victim in three_manifests().plan_lru(size).victims] == manifests


def test_lru_passes_over_leased_manifests_and_says_so() -> None:
    index = three_manifests()
    index.leases.take(M, stage("s"))
    plan = index.plan_lru(5)
    assert [victim.manifest for victim in plan.victims] == [N, P]
    assert plan.refused == (Leased(M, (stage("s"),)),)
    assert [victim.manifest for victim in index.plan_lru(1, force=True).victims] == [M]


def test_lost_content_makes_every_manifest_that_names_it_incomplete() -> None:
    index = three_manifests()
    assert index.lose(B) == 2
    assert index.lose(B) == 0
    assert not index.is_complete(M)
    assert not index.is_complete(N)
    assert index.is_complete(P)
    assert index.manifests() == (M, N, P)
    assert index.ledger.used_bytes == 13


def test_lost_content_is_reserved_again_by_the_next_admission_and_frees_nothing_meanwhile() -> None:
    index = three_manifests()
    index.lose(B)
    assert index.plan([M, N]).victims == (Victim(M, (A,), 1), Victim(N, (C,), 4))
    assert index.admit(M, sizes(a=1, b=2), stage("s"), now=9, budget=15) == Admission((), (B,))


def test_leased_bytes_count_shared_content_once_and_lost_content_not() -> None:
    index = three_manifests()
    index.leases.take(M, stage("s1"))
    index.leases.take(N, stage("s2"))
    index.leases.take(named("not held"), stage("s3"))
    assert index.leased_bytes() == 7
    index.lose(C)
    assert index.leased_bytes() == 3


def test_a_restart_counts_what_is_on_disk_whole_or_partial() -> None:
    index = CacheIndex()
    index.restore(M, sizes(a=1, b=2, c=4), {A: True, B: False}, last_used=5)
    assert (index.ledger.committed_bytes, index.ledger.reserved_bytes) == (1, 2)
    assert not index.is_complete(M)
    assert index.recency.last_used(M) == 5
    assert index.contents_of(M) == sizes(a=1, b=2, c=4)
    assert index.admit(M, sizes(a=1, b=2, c=4), stage("s"), now=6, budget=7).missing == (B, C)


def test_a_restart_counts_shared_content_once() -> None:
    index = CacheIndex()
    index.restore(M, sizes(a=1, b=2), {A: True, B: True}, last_used=1)
    index.restore(N, sizes(b=2, c=4), {B: True, C: True}, last_used=2)
    assert index.ledger.used_bytes == 7
    assert index.named_by(B) == {M, N}


def test_a_restart_keeps_the_order_of_last_uses() -> None:
    index = CacheIndex()
    for manifest, last_used in ((M, 3), (N, 1), (P, 2)):
        index.restore(manifest, sizes(a=1), {A: True}, last_used=last_used)
    assert index.manifests() == (N, P, M)
