"""Ways to break the arithmetic of space, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_STEPS = "tests/promises/test_space.py::test_a_million_steps_never_pass_the_budget_nor_touch_what_is_leased"
_LAWS = "tests/property/test_tier_budget_laws.py::"

BREAKAGES: Final = [
    Breakage(
        "space",
        "bdn/core/cache/index.py",
        "what is on its way takes no room",
        "self._over = ledger.used_bytes +",
        "self._over = ledger.committed_bytes +",
        _STEPS,
        also=("tests/promises/test_space.py::test_ten_stages_at_once_on_a_small_disk_never_fill_it",),
    ),
    Breakage(
        "space",
        "bdn/core/cache/index.py",
        "a refused newcomer is let in all the same",
        "        if not shortfall.is_met:\n            raise",
        "        if False:\n            raise",
        _STEPS,
    ),
    Breakage(
        "leases",
        "bdn/core/cache/index.py",
        "leased manifests make room",
        "if one != manifest and not self.leases.is_leased(one)",
        "if one != manifest",
        _STEPS,
    ),
    Breakage(
        "space",
        "bdn/core/cache/ledger.py",
        "a fill that ends frees nothing of its promise",
        "        self._committed[digest] = size\n        self.reserved_bytes -= size\n",
        "        self._committed[digest] = size\n",
        _STEPS,
    ),
    Breakage(
        "space",
        "bdn/core/cache/tier_budgets.py",
        "a neighbour empties the cache",
        "max(keep.node, there - cluster)",
        "max(0, there - cluster)",
        _STEPS,
    ),
    Breakage(
        "space",
        "bdn/core/cache/tier_budgets.py",
        "a pressed cache grows",
        "node=min(used.node, min(limits.node, disk) * percent // 100)",
        "node=min(limits.node, disk) * percent // 100",
        f"{_LAWS}test_who_keeps_more_than_is_there_takes_in_only_what_it_gives_up",
    ),
]
