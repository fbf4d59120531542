"""Ways to break a cluster tier whose disk fails, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_failing_disk.py::"
_READ_ONLY = (
    f"{_TEST}test_a_cluster_tier_whose_disk_turns_read_only_holds_what_it_held_and_takes_in_more_once_it_may_write"
)

BREAKAGES: Final = [
    Breakage(
        "space",
        "node_agent/cache/cluster_tier.py",
        "a chunk for which nothing could be deleted is on its way for ever",
        "                self.index.lose(chunk)\n                raise\n",
        "                raise\n",
        _READ_ONLY,
    ),
    Breakage(
        "space",
        "node_agent/cache/cluster_tier.py",
        "chunks that the disk did not delete are forgotten",
        "            self._count_again(left, last_used)\n",
        "",
        _READ_ONLY,
        also=("tests/property/test_cluster_tier_machine.py::TestClusterTierMachine::runTest",),
    ),
    Breakage(
        "space",
        "node_agent/cache/cluster_tier.py",
        "what the disk did not delete is younger than it was",
        "last_used=last_used[manifest])",
        "last_used=found.last_used)",
        "tests/property/test_cluster_tier_machine.py::TestClusterTierMachine::runTest",
    ),
    Breakage(
        "space",
        "node_agent/serve/owner.py",
        "a chunk that somebody else is about to hold is asked for in a loop",
        "        elif not self.shelf.holds(digest):",
        "        elif False:",
        f"{_TEST}test_who_asks_for_a_chunk_that_is_for_ever_on_its_way_is_told_so_and_gets_it_once_it_is_not",
    ),
]
