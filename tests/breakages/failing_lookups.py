"""Ways to end an agent by a disk that does not say what stands where, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_failing_disk.py::"
_FAILED = f"{_TEST}test_a_stage_that_fails_where_nothing_can_be_looked_at_is_failed_and_ends_no_other_and_comes_later"
_KEPT = f"{_TEST}test_a_stage_that_cannot_be_mended_where_nothing_can_be_looked_at_stays_and_is_mended_later"

BREAKAGES: Final = [
    Breakage(
        "space",
        "node_agent/stage/view/views.py",
        "a mount that cannot be looked at ends the agent",
        "        with disk_errors(place):\n            is_link = place.is_symlink()\n",
        "        is_link = place.is_symlink()\n",
        _FAILED,
    ),
    Breakage(
        "space",
        "node_agent/stage/view/views.py",
        "a view that cannot be looked at ends the agent",
        "        with disk_errors(root):\n            return root.is_dir()\n",
        "        return root.is_dir()\n",
        _KEPT,
    ),
    Breakage(
        "space",
        "node_agent/cache/eviction.py",
        "a part that cannot be looked at ends the agent",
        "        with disk_errors(self.places.filling):\n            return",
        "        if True:\n            return",
        _FAILED,
        also=(_KEPT,),
    ),
    Breakage(
        "space",
        "node_agent/cache/eviction.py",
        "a whole file that cannot be looked at is a bug of ours",
        "            with disk_errors(path):\n                if path.exists()",
        "            if True:\n                if path.exists()",
        f"{_TEST}test_an_eviction_where_neither_can_be_deleted_nor_be_looked_is_an_error_that_names_the_disk",
    ),
    Breakage(
        "space",
        "node_agent/stage/lifecycle.py",
        "a stage whose space cannot be given back ends the agent when it fails",
        "        await self._give_back(record, self.cache.leave(record.id))\n        try:\n",
        "        await self.cache.leave(record.id)\n        try:\n",
        _FAILED,
    ),
    Breakage(
        "space",
        "node_agent/stage/lifecycle.py",
        "a stage whose space cannot be given back ends the agent when it is not mended",
        "        await self._give_back(record, self.cache.rest(record.id))\n",
        "        await self.cache.rest(record.id)\n",
        _KEPT,
    ),
    Breakage(
        "space",
        "node_agent/stage/lifecycle.py",
        "a stage whose view cannot be looked at is taken down",
        "            return True\n",
        "            return False\n",
        _KEPT,
    ),
]
