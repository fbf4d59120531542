"""What a disk without room keeps an agent from, though it need not."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

BREAKAGES: Final = [
    Breakage(
        "space",
        "node_agent/disk/cache_directory.py",
        "each start writes what stands there",
        "        if not places.format.exists():\n",
        "        if places.root.exists():\n",
        "tests/promises/test_space.py::test_an_agent_that_starts_on_a_full_disk_serves_what_it_holds_and_recovers",
    ),
]
