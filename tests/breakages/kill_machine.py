"""Ways to break what the cache keeps through kills, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = (
    "tests/promises/test_kills.py::"
    "test_ten_thousand_kills_lose_nothing_that_was_acknowledged_and_show_nothing_that_is_wrong"
)

BREAKAGES: Final = [
    Breakage(
        "commit-order",
        "node_agent/fill/part.py",
        "a part is taken for whole before its bytes are there",
        "    def write(self, chunk: PlacedChunk, buffer: memoryview) -> None:\n"
        '        """Put a verified chunk at its place. Durable with its batch, at the latest with ``close``."""\n'
        "        with disk_errors(self._path):\n",
        "    def write(self, chunk: PlacedChunk, buffer: memoryview) -> None:\n"
        '        """Put a verified chunk at its place. Durable with its batch, at the latest with ``close``."""\n'
        "        with disk_errors(self._path):\n"
        "            self._places.file(self.layout.digest).unlink(missing_ok=True)\n"
        "            os.link(self._path, self._places.file(self.layout.digest))\n",
        _TEST,
    ),
    Breakage(
        "commit-order",
        "node_agent/cache/eviction.py",
        "an eviction removes contents before the record",
        "            self.records.forget(victim.manifest)\n            for content in victim.contents:\n",
        "            for content in victim.contents:\n",
        _TEST,
    ),
    Breakage(
        "leases",
        "node_agent/stage/housekeeping.py",
        "leases end with the process",
        "                self.lifecycle.lease_again(record)\n",
        "                pass\n",
        _TEST,
    ),
    Breakage(
        "space",
        "node_agent/cache/scan.py",
        "what a fill had begun is not counted after a restart",
        "                begun.add(digest)\n",
        "                pass\n",
        _TEST,
    ),
    Breakage(
        "whole-files",
        "node_agent/stage/view/views.py",
        "a view is built where jobs look",
        '        aside = root.with_name(f"{stage_id}{_BUILDING}")\n',
        "        aside = root\n        remove_tree(root)\n",
        _TEST,
    ),
]
