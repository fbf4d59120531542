"""Ways to fail at files that may not be read, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

BREAKAGES: Final = [
    Breakage(
        "corruption",
        "node_agent/scrub/reading.py",
        "what may not be read ends the round",
        "        return 0, error.strerror or str(error)\n",
        "        if isinstance(error, PermissionError):\n            raise\n        return 0, error.strerror or str(error)\n",
        "tests/promises/test_corruption_on_a_failing_disk.py::"
        "test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "views go on showing the file that was replaced",
        "                await in_thread(self.repair.relink, target.content, earlier)\n",
        "                pass\n",
        "tests/promises/test_corruption_on_a_failing_disk.py::"
        "test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "a stage that shows what could not be replaced yet counts as whole once somebody else brings the file",
        "                await in_thread(self.repair.mark_lacking, target.content, earlier)\n",
        "                pass\n",
        "tests/promises/test_corruption_on_a_failing_disk.py::"
        "test_a_stage_that_still_shows_an_unreadable_file_is_mended_also_when_the_new_one_came_late",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "chunks are fetched for a file that nobody may write to",
        "            await in_thread(check_writable, target.path)\n",
        "",
        "tests/promises/test_corruption_on_a_failing_disk.py::"
        "test_what_may_not_be_read_any_more_is_told_and_replaced_in_one_round_and_the_agent_goes_on",
    ),
]
