"""Ways to count what is not there, or not to count what is, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_space.py::"
_REFUSED = (
    f"{_TEST}test_after_a_refused_stage_what_made_room_for_it_is_whole_also_where_the_stage_shared_a_file_with_it"
)
_AGAIN = "            room = max(room, await in_thread(self.space.room), key=lambda one: one.budgets.node)\n"

BREAKAGES: Final = [
    Breakage(
        "space",
        "node_agent/cache/admission.py",
        "what a refused stage shared with a victim stays promised to it",
        "for content in (*self._absent, *given_up):",
        "for content in self._absent:",
        _REFUSED,
        also=("tests/property/test_admission_laws.py::test_what_came_to_nothing_left_nothing_behind",),
    ),
    Breakage(
        "space",
        "node_agent/cache/node_cache.py",
        "the disk is looked at while another deletes",
        "        async with self._lock:\n            await to_the_end(self._trim())\n",
        "        room = await in_thread(self.space.room)\n        self.space.room = lambda: room\n"
        "        async with self._lock:\n            await to_the_end(self._trim())\n",
        f"{_TEST}test_what_a_stage_is_deleting_for_itself_is_not_evicted_once_more_for_the_room_that_it_takes",
    ),
    Breakage(
        "space",
        "node_agent/cache/node_cache.py",
        "a file that is just becoming whole costs another",
        _AGAIN,
        "            pass\n",
        f"{_TEST}test_a_file_that_is_just_becoming_whole_costs_no_other",
    ),
    Breakage(
        "space",
        "node_agent/cache/node_cache.py",
        "what is over the budget stays",
        'await self._eviction.evict(lambda index: index.plan_lru(held - budget), "trim", account)',
        "pass",
        f"{_TEST}test_what_is_over_the_budget_goes_as_far_as_it_is_over_and_no_further",
    ),
]
