"""Two tiers on one disk: never more than is there or kept, nothing left lying, and the cluster tier shrinks last."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.cache.space import NOTHING, TierBudgets, kept, share, tier_limits

pytestmark = pytest.mark.promise("space")

sizes = st.integers(0, 1000)
disks = st.integers(-200, 2000)  # others may have taken more than there was for us
roles = st.sampled_from([("node",), ("cluster",), ("node", "cluster")])
limits = st.builds(tier_limits, roles, sizes, st.none() | sizes, st.integers(-100, 1000))
uses = st.builds(TierBudgets, sizes, sizes)


class Case(NamedTuple):
    """What there is for both tiers together, what each may have and uses, and ``percent`` of which size of disk is kept."""

    limits: TierBudgets
    there: int
    used: TierBudgets
    disk: int
    percent: int

    @property
    def keep(self) -> TierBudgets:
        return kept(self.used, self.limits, self.disk, self.percent)

    @property
    def got(self) -> TierBudgets:
        return share(self.there, self.limits, self.keep)


cases = st.builds(Case, limits, disks, uses, sizes, st.integers(0, 100))


@given(cases)
def test_both_together_get_no_more_than_there_is_or_than_they_keep(case: Case) -> None:
    keep, got = case.keep, case.got
    assert got.node + got.cluster <= max(case.there, keep.node + keep.cluster)
    assert keep.node <= got.node <= case.limits.node
    assert keep.cluster <= got.cluster <= case.limits.cluster


@given(cases)
def test_who_keeps_more_than_is_there_takes_in_only_what_it_gives_up(case: Case) -> None:
    got = case.got
    if got.node + got.cluster > max(0, case.there):
        assert got.node <= case.used.node
        assert got.cluster <= case.used.cluster


@given(cases)
def test_what_is_kept_is_in_use_and_no_more_than_the_share_of_the_limit_or_of_the_disk(case: Case) -> None:
    for tier in ("node", "cluster"):
        most = min(getattr(case.limits, tier), case.disk)
        assert getattr(case.keep, tier) == min(getattr(case.used, tier), most * case.percent // 100)


@given(cases)
def test_the_cluster_tier_gives_up_nothing_while_the_node_tier_has_more_than_it_keeps(case: Case) -> None:
    assert case.got.cluster == case.limits.cluster or case.got.node == case.keep.node


@given(cases)
def test_a_tier_is_short_of_its_limit_only_when_all_that_is_there_is_given(case: Case) -> None:
    keep, got = case.keep, case.got
    assert got == case.limits or got.node + got.cluster == max(case.there, keep.node + keep.cluster)


@given(cases, sizes)
def test_more_room_on_the_disk_takes_nothing_from_either(case: Case, more: int) -> None:
    before, after = case.got, share(case.there + more, case.limits, case.keep)
    assert after.node >= before.node
    assert after.cluster >= before.cluster


@given(cases)
def test_who_keeps_nothing_gives_way_altogether(case: Case) -> None:
    assert case._replace(percent=0).keep == NOTHING
    assert share(case.there, case.limits) == share(case.there, case.limits, NOTHING)


@given(sizes, st.none() | sizes, st.integers(-100, 1000))
def test_a_tier_has_what_its_role_and_the_operator_allow_and_without_a_word_the_cluster_a_tenth_of_what_can_be_had(
    limit: int, cluster_limit: int | None, there: int
) -> None:
    tenth = max(0, min(limit, there)) // 10
    alone, beside = (limit, tenth) if cluster_limit is None else (cluster_limit, cluster_limit)
    assert tier_limits(("node",), limit, cluster_limit, there) == TierBudgets(limit, 0)
    assert tier_limits(("cluster",), limit, cluster_limit, there) == TierBudgets(0, alone)
    assert tier_limits(("node", "cluster"), limit, cluster_limit, there) == TierBudgets(limit, beside)
