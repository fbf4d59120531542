"""Ways to break what is promised of evictions that are killed, or that come between the steps of a stage."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST: Final = "tests/promises/test_evictions.py::"
_KILLED: Final = f"{_TEST}test_an_eviction_killed_at_any_step_is_all_or_nothing_and_leased_manifests_stay_whole"
_STAGE_BETWEEN: Final = f"{_TEST}test_a_stage_between_any_two_steps_of_an_eviction_has_all_its_files"
_BETWEEN: Final = f"{_TEST}test_an_eviction_between_any_two_steps_of_a_stage_leaves_no_hole"

BREAKAGES: Final = [
    Breakage(
        "commit-order",
        "node_agent/cache/node_cache.py",
        "an eviction removes the record last",
        "            self.records.forget(victim.manifest)\n"
        "            for content in victim.contents:\n"
        "                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):\n"
        "                    with disk_errors(path):\n"
        "                        path.unlink(missing_ok=True)\n",
        "            for content in victim.contents:\n"
        "                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):\n"
        "                    with disk_errors(path):\n"
        "                        path.unlink(missing_ok=True)\n"
        "            self.records.forget(victim.manifest)\n",
        _KILLED,
    ),
    Breakage(
        "commit-order",
        "node_agent/cache/scan.py",
        "what a killed eviction left is not removed",
        "                self._remove(Path(entry.path))  # nobody names it: an eviction was interrupted\n",
        "                pass\n",
        _KILLED,
    ),
    Breakage(
        "leases",
        "node_agent/mirror_link/evictions.py",
        "a plan is carried out",
        "        if command.dry_run:\n            return plan(self.cache.index)\n",
        "",
        _KILLED,
    ),
    Breakage(
        "leases",
        "bdn/core/cache/index.py",
        "what is admitted is not leased",
        "        self.leases.take(manifest, holder)\n        return Admission",
        "        return Admission",
        _BETWEEN,
    ),
    Breakage(
        "whole-files",
        "node_agent/cache/node_cache.py",
        "an eviction and an admission change the cache at the same time",
        "        async with self._lock:\n            return await to_the_end(self._eviction.evict(plan, reason, account))\n",
        "        return await to_the_end(self._eviction.evict(plan, reason, account))\n",
        _STAGE_BETWEEN,
    ),
    Breakage(
        "leases",
        "node_agent/stage/lifecycle.py",
        "a stage that is released goes on",
        "                await self.stop(stage)\n                await to_the_end",
        "                await to_the_end",
        _BETWEEN,
    ),
]
