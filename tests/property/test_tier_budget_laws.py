"""Two tiers on one disk: never more than is there or kept, nothing left lying, and the cluster tier shrinks last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.cache.space import NOTHING, TierBudgets, kept, share, tier_limits

pytestmark = pytest.mark.promise("space")

sizes = st.integers(0, 1000)
disks = st.integers(-200, 2000)  # others may have taken more than there was for us
percents = st.integers(0, 100)
limits = st.builds(
    tier_limits,
    st.sampled_from([("node",), ("cluster",), ("node", "cluster")]),
    sizes,
    st.none() | sizes,
    st.integers(-100, 1000),
)
uses = st.builds(TierBudgets, sizes, sizes)


@given(limits, disks)
def test_both_together_get_no_more_than_there_is_and_neither_more_than_its_limit(
    limits: TierBudgets, there: int
) -> None:
    got = share(there, limits)

    assert got.node + got.cluster <= max(0, there)
    assert 0 <= got.node <= limits.node
    assert 0 <= got.cluster <= limits.cluster


@given(limits, disks, uses, sizes, percents)
def test_both_together_get_no_more_than_there_is_or_than_they_keep(
    limits: TierBudgets, there: int, used: TierBudgets, disk: int, percent: int
) -> None:
    keep = kept(used, limits, disk, percent)
    got = share(there, limits, keep)

    assert got.node + got.cluster <= max(there, keep.node + keep.cluster)
    assert keep.node <= got.node <= limits.node
    assert keep.cluster <= got.cluster <= limits.cluster


@given(limits, disks, uses, sizes, percents)
def test_who_keeps_more_than_is_there_takes_in_only_what_it_gives_up(
    limits: TierBudgets, there: int, used: TierBudgets, disk: int, percent: int
) -> None:
    got = share(there, limits, kept(used, limits, disk, percent))

    if got.node + got.cluster > max(0, there):
        assert got.node <= used.node
        assert got.cluster <= used.cluster


@given(limits, uses, sizes, percents)
def test_what_is_kept_is_in_use_and_no_more_than_the_share_of_the_limit_or_of_the_disk(
    limits: TierBudgets, used: TierBudgets, disk: int, percent: int
) -> None:
    keep = kept(used, limits, disk, percent)

    for tier in ("node", "cluster"):
        most = min(getattr(limits, tier), disk)
        assert getattr(keep, tier) == min(getattr(used, tier), most * percent // 100)


@given(limits, disks, uses, sizes, percents)
def test_the_cluster_tier_gives_up_nothing_while_the_node_tier_has_more_than_it_keeps(
    limits: TierBudgets, there: int, used: TierBudgets, disk: int, percent: int
) -> None:
    keep = kept(used, limits, disk, percent)
    got = share(there, limits, keep)

    assert got.cluster == limits.cluster or got.node == keep.node


@given(limits, disks, uses, sizes, percents)
def test_a_tier_is_short_of_its_limit_only_when_all_that_is_there_is_given(
    limits: TierBudgets, there: int, used: TierBudgets, disk: int, percent: int
) -> None:
    keep = kept(used, limits, disk, percent)
    got = share(there, limits, keep)

    assert got == limits or got.node + got.cluster == max(there, keep.node + keep.cluster)


@given(limits, disks, sizes, uses, sizes, percents)
def test_more_room_on_the_disk_takes_nothing_from_either(
    limits: TierBudgets, there: int, more: int, used: TierBudgets, disk: int, percent: int
) -> None:
    keep = kept(used, limits, disk, percent)
    before, after = share(there, limits, keep), share(there + more, limits, keep)

    assert after.node >= before.node
    assert after.cluster >= before.cluster


@given(limits, disks, uses, sizes)
def test_who_keeps_nothing_gives_way_altogether(limits: TierBudgets, there: int, used: TierBudgets, disk: int) -> None:
    assert kept(used, limits, disk, 0) == NOTHING
    assert share(there, limits) == share(there, limits, NOTHING)


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


@given(sizes, st.integers(-100, 1000))
def test_without_a_word_from_the_operator_the_cluster_has_a_tenth_of_what_the_cache_can_have(
    limit: int, there: int
) -> None:
    tenth = tier_limits(("node", "cluster"), limit, None, there).cluster

    assert tenth == max(0, min(limit, there)) // 10
