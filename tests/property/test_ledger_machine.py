"""The ledger of space against two plain dictionaries that are summed anew at every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bdn.core.cache.index import SpaceLedger
from bdn.core.chunk import Digest
from tests.support.content.names import named

CONTENTS = [named(f"content {number}") for number in range(5)]
contents = st.sampled_from(CONTENTS)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = SpaceLedger()
        self.state = dict.fromkeys(CONTENTS, "absent")
        self.size = dict.fromkeys(CONTENTS, 0)

    @rule(digest=contents, size=st.integers(0, 9))
    def reserve(self, digest: Digest, size: int) -> None:

        if self.state[digest] != "absent":
            with pytest.raises(ValueError, match="counted already"):
                self.ledger.reserve(digest, size)
            return
        self.ledger.reserve(digest, size)
        self.state[digest], self.size[digest] = "reserved", size

    @rule(digest=contents)
    def commit(self, digest: Digest) -> None:

        if self.state[digest] == "absent":
            with pytest.raises(KeyError):
                self.ledger.commit(digest)
            return
        self.ledger.commit(digest)
        self.state[digest] = "committed"

    @rule(digest=contents)
    def release(self, digest: Digest) -> None:

        assert self.ledger.release(digest) == self.size[digest]
        self.state[digest], self.size[digest] = "absent", 0

    @invariant()
    def sums_and_sizes_are_those_of_the_model(self) -> None:
        def total(state: str) -> int:
            return sum(self.size[digest] for digest in CONTENTS if self.state[digest] == state)

        assert self.ledger.reserved_bytes == total("reserved")
        assert self.ledger.committed_bytes == total("committed")
        assert self.ledger.used_bytes == sum(self.size.values())
        for digest in CONTENTS:
            assert self.ledger.size_of(digest) == (None if self.state[digest] == "absent" else self.size[digest])
            assert self.ledger.is_committed(digest) == (self.state[digest] == "committed")


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=settings().max_examples // 2)
