"""Ways to share one disk wrongly between the two tiers, each noticed by one of the laws."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_LAWS: Final = "tests/property/test_tier_budget_laws.py::"


def _broken(what: str, old: str, new: str, *laws: str) -> Breakage:
    first, *others = [f"{_LAWS}{law}" for law in laws]
    return Breakage("space", "node_agent/cache/space.py", what, old, new, first, tuple(others))


BREAKAGES: Final = [
    _broken("both tiers are promised the same bytes", "max(keep.node, there - cluster)", "max(keep.node, there)",
            "test_both_together_get_no_more_than_there_is_and_neither_more_than_its_limit",
            "test_both_together_get_no_more_than_there_is_or_than_they_keep",
            "test_a_tier_is_short_of_its_limit_only_when_all_that_is_there_is_given"),
    _broken("the cluster tier keeps all that it uses", "cluster=min(used.cluster, min(limits.cluster, disk) * percent // 100)",
            "cluster=min(used.cluster, limits.cluster, disk)",
            "test_what_is_kept_is_in_use_and_no_more_than_the_share_of_the_limit_or_of_the_disk",
            "test_who_keeps_nothing_gives_way_altogether"),
    _broken("the cluster tier shrinks first", "max(keep.cluster, there - keep.node)", "max(keep.cluster, there - limits.node)",
            "test_the_cluster_tier_gives_up_nothing_while_the_node_tier_has_more_than_it_keeps"),
    _broken("the cluster tier has all of its room or none", "min(limits.cluster, max(keep.cluster, there - keep.node))",
            "limits.cluster if limits.cluster <= there - keep.node else keep.cluster",
            "test_more_room_on_the_disk_takes_nothing_from_either"),
    _broken("an agent of the ring alone has room for whole files",
            "return TierBudgets(node=0, cluster=limit if", "return TierBudgets(node=limit, cluster=limit if",
            "test_a_tier_without_its_role_has_nothing_and_the_other_all_that_is_allowed"),
    _broken("an operator's nothing is taken for no word", "cluster=tenth if cluster_limit is None else cluster_limit",
            "cluster=cluster_limit or tenth", "test_what_the_operator_says_of_the_cluster_tier_is_its_limit"),
    _broken("a disk that others filled has less than nothing for the cluster", "tenth = max(0, min(limit, there)) //",
            "tenth = min(limit, there) //",
            "test_without_a_word_from_the_operator_the_cluster_has_a_tenth_of_what_the_cache_can_have"),
]  # fmt: skip
