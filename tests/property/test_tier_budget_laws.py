"""Two tiers on one disk: never more than is there, nothing left lying, and the cluster tier shrinks last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.tier_budgets import TierBudgets, share, tier_limits

sizes = st.integers(0, 1000)
disks = st.integers(-200, 2000)  # others may have taken more than there was for us
limits = st.builds(
    tier_limits,
    st.sampled_from([("node",), ("cluster",), ("node", "cluster")]),
    sizes,
    st.none() | sizes,
    sizes,
)


@given(limits, disks)
def test_both_together_get_no_more_than_there_is_and_neither_more_than_its_limit(
    limits: TierBudgets, there: int
) -> None:
    got = share(there, limits)

    assert got.node + got.cluster <= max(0, there)
    assert 0 <= got.node <= limits.node
    assert 0 <= got.cluster <= limits.cluster


@given(limits, disks)
def test_the_cluster_tier_gives_up_nothing_while_the_node_tier_has_anything(limits: TierBudgets, there: int) -> None:
    got = share(there, limits)

    assert got.cluster == limits.cluster or got.node == 0


@given(limits, disks)
def test_a_tier_is_short_of_its_limit_only_when_all_that_is_there_is_given(limits: TierBudgets, there: int) -> None:
    got = share(there, limits)

    assert got == limits or got.node + got.cluster == max(0, there)


@given(limits, disks, sizes)
def test_more_room_on_the_disk_takes_nothing_from_either(limits: TierBudgets, there: int, more: int) -> None:
    before, after = share(there, limits), share(there + more, limits)

    assert after.node >= before.node
    assert after.cluster >= before.cluster


@given(sizes, st.none() | sizes, sizes)
def test_a_tier_without_its_role_has_nothing_and_the_other_all_that_is_allowed(
    limit: int, cluster_limit: int | None, there: int
) -> None:
    assert tier_limits(("node",), limit, cluster_limit, there) == TierBudgets(limit, 0)
    alone = limit if cluster_limit is None else cluster_limit
    assert tier_limits(("cluster",), limit, cluster_limit, there) == TierBudgets(0, alone)


@given(sizes, sizes, sizes)
def test_what_the_operator_says_of_the_cluster_tier_is_its_limit(limit: int, cluster_limit: int, there: int) -> None:
    assert tier_limits(("node", "cluster"), limit, cluster_limit, there) == TierBudgets(limit, cluster_limit)


@given(sizes, sizes)
def test_without_a_word_from_the_operator_the_cluster_has_a_tenth_of_what_the_cache_can_have(
    limit: int, there: int
) -> None:
    tenth = tier_limits(("node", "cluster"), limit, None, there).cluster

    assert tenth * 10 <= min(limit, there) < tenth * 10 + 10
