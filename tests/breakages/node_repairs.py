"""What keeps a scrub from finding, or from mending, damage that is not a wrong chunk of a file whose layout is known."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_NODE: Final = "tests/promises/test_corruption_on_the_node.py"
_STORE: Final = "tests/promises/test_corruption_in_the_store.py"
_FAILING: Final = "tests/promises/test_corruption_on_a_failing_disk.py"


def _breakage(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("corruption", file, what, old, new, test)


BREAKAGES: Final = [
    _breakage(
        "node_agent/mirror_link/verifications.py",
        "the grants that a command lends are not used",
        "using(command.grants)",
        "using([])",
        f"{_NODE}::test_without_a_grant_that_is_good_it_is_put_aside_and_a_command_may_lend_one",
    ),
    _breakage(
        "node_agent/scrub/scrubber.py",
        "a file that vanished is taken for an evicted one",
        "            wrong, layout = [_GONE], None\n",
        "            return\n",
        f"{_NODE}::test_a_file_that_vanished_or_grew_is_whole_again",
    ),
    _breakage(
        "node_agent/scrub/reading.py",
        "what the disk cannot read is passed over",
        'return Damage(f"it cannot be read: {failure}", chunk), 0',
        "return None, 0",
        f"{_NODE}::test_what_the_disk_cannot_read_is_written_again",
    ),
    _breakage(
        "node_agent/scrub/reading.py",
        "a file whose chunks nobody knows is right when all of it can be read",
        "return len(known) == len(digests) and file_digest(size, known) == content",
        "return len(known) == len(digests)",
        f"{_NODE}::test_a_file_whose_chunks_nobody_knows_is_checked_as_a_whole",
    ),
    _breakage(
        "node_agent/scrub/repair.py",
        "whoever asks about a folder is answered about one file of it",
        "if PurePosixPath(entry.path).is_relative_to(below):",
        "if PurePosixPath(entry.path) == below:",
        f"{_NODE}::test_a_linked_file_that_somebody_edited_is_itself_again",
    ),
    _breakage(
        "node_agent/scrub/findings.py",
        "a round begins anew with each start",
        "self.round = ScrubRound(body.began, after, body.ended)",
        "self.round = ScrubRound(body.began, None, body.ended)",
        f"{_NODE}::test_a_round_goes_on_after_a_restart_where_it_was",
    ),
    _breakage(
        "bdn/mirror/scrub/repair.py",
        "what nobody could give once is never asked for again",
        "return tried_at is None or not 0 <= self.clock() - tried_at < AGAIN_SECONDS",
        "return tried_at is None",
        f"{_STORE}::test_what_nobody_has_stays_damaged_is_not_served_and_is_repaired_once_somebody_has_it",
    ),
    _breakage(
        "node_agent/scrub/scrubber.py",
        "a disk that takes no note keeps from a repair",
        '            logger.warning("the suspects of the scrub are not noted: %s", error)\n',
        "            raise error from error\n",
        f"{_FAILING}::test_where_nothing_can_be_noted_every_wrong_file_is_mended_all_the_same",
    ),
    _breakage(
        "node_agent/scrub/reading.py",
        "a file of which the disk says nothing ends the round",
        "    except OSError:\n        return None\n",
        "    except OSError:\n        raise\n",
        f"{_FAILING}::test_a_folder_that_the_disk_has_made_a_file_of_costs_what_was_in_it_and_the_round_goes_on",
    ),
]
