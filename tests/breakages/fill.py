"""Ways to take wrong bytes for right ones on their way to a node, or to blame nobody for them."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_SUPPLY: Final = "tests/unit/node_agent/test_reader_chain.py::"
_WIRE: Final = "tests/fault/test_agent_cancel.py::"


def _broken(file: str, what: str, old: str, new: str, test: str, *also: str) -> Breakage:
    return Breakage("corruption", file, what, old, new, test, also)


BREAKAGES: Final = [
    _broken(
        "node_agent/fetch/chain.py",
        "what is read here goes into a chunk that came in part from elsewhere",
        "        chunk.restart()  # reading overwrites",
        "        # reading overwrites",
        f"{_SUPPLY}test_what_is_damaged_here_does_not_get_into_what_came_from_elsewhere",
    ),
    _broken("node_agent/fetch/peers.py", "a peer that lies is blamed like one that failed",
            "Fault.WRONG if len(senders) == 1 else Fault.FAILED", "Fault.FAILED",
            f"{_SUPPLY}test_an_owner_that_lies_is_found_out_and_the_whole_comes_from_the_mirror"),
    _broken("node_agent/fetch/peers.py", "of several who sent a wrong chunk the first alone is blamed",
            "for sender in senders:", "for sender in senders[:1]:",
            f"{_SUPPLY}test_of_two_who_sent_a_wrong_chunk_together_both_are_suspected"),
    _broken("bdn/transfer/chunk_readers.py", "what the mirror sends the second time is believed",
            "            reader.read_into(chunk)\n            chunk.check()",
            "            reader.read_into(chunk)\n            if reader is not self.again:\n                chunk.check()",
            f"{_SUPPLY}test_a_mirror_that_lies_twice_is_an_error"),
    _broken("bdn/transfer/chunk_readers.py", "a wrong chunk of the mirror is not asked for again",
            "except (ChecksumMismatchError, WrongLengthError):\n            self._verified(self.again", "except WrongLengthError:\n            self._verified(self.again",
            f"{_WIRE}test_a_fault_that_passes_is_not_noticed"),
    _broken("bdn/core/store/layout.py", "a layout is believed when it has as many chunks as the file",
            "if not fits or file_digest(self.size, self.chunks) != self.digest:", "if not fits:",
            f"{_WIRE}test_a_layout_that_does_not_make_up_the_file_is_refused"),
    _broken("node_agent/fill/part.py", "what an earlier fill left is not compared with its name",
            "return size == chunk.range.size and digest_of(buffer) == chunk.digest", "return size == chunk.range.size",
            "tests/fault/test_agent_disk.py::test_a_chunk_that_was_damaged_in_a_part_is_fetched_again"),
    _broken("bdn/mirror/ingest/copier.py", "a small file is not compared with what its upstream says of it",
            "            if stated is not None:", "            if stated is not None and located.file.size > 1 << 20:",
            "tests/integration/test_mirror_requests.py::test_what_came_wrong_is_kept_and_what_is_right_is_published[packed]"),
    _broken("bdn/mirror/ingest/copy_missing.py", "of a large file that came wrong no evidence is kept",
            "            await self._quarantine(file, error)\n            raise\n", "            raise error\n",
            "tests/integration/test_mirror_requests.py::test_what_came_wrong_is_kept_and_what_is_right_is_published[in chunks]"),
]  # fmt: skip
