"""Ways to break what is promised of space on real disks, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_space.py::"

BREAKAGES: Final = [
    Breakage(
        "space",
        "bdn/disk/durable.py",
        "a quota is told like a full disk",
        'reason += _REMEDIES.get(error.errno or 0, "")',
        "pass",
        f"{_TEST}test_a_quota_fails_the_stage_that_it_stops_by_name_and_evicts_nothing",
    ),
    Breakage(
        "space",
        "node_agent/cache/space.py",
        "a disk that has turned read-only is said to be ready",
        "        if disk.f_flag & os.ST_RDONLY:\n",
        "        if False:\n",
        f"{_TEST}test_a_disk_that_turns_read_only_fails_new_stages_and_leaves_what_is_there",
    ),
    Breakage(
        "space",
        "node_agent/cache/space.py",
        "nothing is kept from a neighbour on a real disk",
        "share(there - padding, limits, keep)",
        "share(there - padding, limits)",
        f"{_TEST}test_a_neighbour_that_fills_the_disk_does_not_empty_the_cache_and_stages_still_swap",
    ),
    Breakage(
        "space",
        "node_agent/cache/space.py",
        "inodes are not looked at",
        "if disk.f_files else None",
        "if False else None",
        f"{_TEST}test_a_million_small_files_on_a_disk_with_few_inodes_are_refused_before_the_first_byte",
    ),
    Breakage(
        "space",
        "node_agent/cache/node_cache.py",
        "a stage is let in whatever the budget says",
        "        budget = await in_thread(self._budget)\n",
        "        budget = await in_thread(self._budget) * 8\n",
        f"{_TEST}test_of_eight_stages_of_thirty_percent_three_proceed_and_five_are_told_the_numbers",
    ),
    Breakage(
        "space",
        "node_agent/disk/cache_directory.py",
        "a lock needs a disk that can be written",
        "            if error.errno != errno.EROFS:\n",
        "            if True:\n",
        f"{_TEST}test_an_agent_that_starts_on_a_read_only_disk_serves_what_it_holds_says_so_and_recovers",
    ),
    Breakage(
        "space",
        "node_agent/cache/space.py",
        "a disk that does not answer is said to be ready",
        "        disk = os.statvfs(folder)\n",
        "        try:\n            disk = os.statvfs(folder)\n        except OSError:\n            return\n",
        f"{_TEST}test_a_disk_that_does_not_answer_how_full_it_is_costs_new_stages_and_nothing_that_is_held",
    ),
]
