"""Who leads and who waits, step by step: one leader at a time for each key, and nobody waits for what is over."""

import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CanceledError, StoreUnavailableError
from node_agent.fetch.reads_in_progress import ReadsInProgress
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(3)]
chunks = st.sampled_from(CHUNKS)
DOWN = StoreUnavailableError("it is down")
ENDS = {"landed": None, "failed": DOWN, "canceled": KeyboardInterrupt(), "broken": ValueError("a bug")}


class ReadsInProgressMachine(RuleBasedStateMachine):
    @initialize()
    def build(self) -> None:
        self.reads = ReadsInProgress()
        self.read: dict[Digest, AbstractContextManager[bool]] = {}  # by chunk that is being read, the leader's block
        self.waiting: dict[Digest, list[Future[None]]] = {chunk: [] for chunk in CHUNKS}

    @rule(chunk=chunks)
    def somebody_asks_for_the_lead(self, chunk: Digest) -> None:
        block = self.reads.lead(chunk)
        assert block.__enter__() == (chunk not in self.read)
        if chunk in self.read:
            block.__exit__(None, None, None)
        else:
            self.read[chunk] = block

    @rule(chunk=chunks)
    def somebody_waits(self, chunk: Digest) -> None:
        landing = self.reads.flight(chunk)
        assert (landing is not None) == (chunk in self.read)
        if landing is not None:
            self.waiting[chunk].append(landing)

    @rule(chunk=chunks, is_stopped=st.booleans())
    def somebody_waits_who_has_no_time(self, chunk: Digest, is_stopped: bool) -> None:
        stop = threading.Event()
        if is_stopped:
            stop.set()
        assert self.reads.wait(chunk, 60 if is_stopped else 0, stop) == (chunk not in self.read)

    @precondition(lambda self: self.read)
    @rule(data=st.data(), end=st.sampled_from(list(ENDS)))
    def a_read_ends(self, data: st.DataObject, end: str) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.read)))
        error, block = ENDS[end], self.read.pop(chunk)
        assert not block.__exit__(type(error) if error else None, error, None)
        over, self.waiting[chunk] = self.waiting[chunk], []
        for landing in over:
            told = landing.exception(0)
            if isinstance(error, BdnError) or error is None:
                assert told is error
            else:
                assert isinstance(told, CanceledError)  # why the leader gave up is nobody else's reason

    @invariant()
    def only_who_waits_for_a_read_that_goes_on_is_still_waiting(self) -> None:
        for chunk in CHUNKS:
            assert not any(landing.done() for landing in self.waiting[chunk])
            assert chunk in self.read or not self.waiting[chunk]


TestReadsInProgressMachine = ReadsInProgressMachine.TestCase
TestReadsInProgressMachine.settings = settings(max_examples=settings().max_examples // 2)
