"""Slots for threads: never more holders than the limit, nobody overtakes, and no slot is lost whoever withdraws when."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.transfer.byte_threads import SlotRequest, Slots
from tests.support.network.hypothesis import BRIEFLY


def slots(count: int) -> Slots:
    """As many as that, always."""
    return Slots(Pace(PaceRule(count, least=count), 0.0), lambda: 0.0)


def test_who_withdraws_after_the_call_passes_the_slot_on() -> None:
    made, first, second = slots(1), SlotRequest(1), SlotRequest(1)
    first.is_withdrawn = True  # in the moment between the call and the look
    assert not made.take(first)
    assert made.take(second)


class WithdrawnMeanwhile(SlotRequest):
    """Somebody withdraws it between two looks."""

    looks = 0

    @property
    def is_withdrawn(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @is_withdrawn.setter
    def is_withdrawn(self, value: bool) -> None:
        pass


def test_who_withdraws_after_the_look_loses_no_slot() -> None:
    made, first, second = slots(1), WithdrawnMeanwhile(1), SlotRequest(1)
    if made.take(first):
        made.give_back(first, Outcome.ARRIVED)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(made.take, second)
        try:
            assert following.result(5)
        finally:
            made.withdraw(second)


def test_a_slot_is_given_back_once() -> None:
    made, first, second = slots(1), SlotRequest(1), SlotRequest(1)
    assert made.take(first)
    made.give_back(first, Outcome.ARRIVED)
    assert made.take(second)
    made.give_back(first, Outcome.ARRIVED)  # its thread ends, which has given it back long ago
    assert second.begun is not None
    third = SlotRequest(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.take, third)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        made.give_back(second, Outcome.ARRIVED)
        assert waiting.result(20)


class Crowd:
    """Threads that want slots, one for each turn, and what is right to expect of them."""

    def __init__(self, count: int, pool: ThreadPoolExecutor) -> None:
        self.count = count
        self.slots = slots(count)
        self.pool = pool
        self.results: dict[SlotRequest, Future[bool]] = {}
        self.holding: list[SlotRequest] = []
        self.waiting: list[SlotRequest] = []

    def ask(self) -> None:
        turn = SlotRequest(1)
        asked = threading.Event()

        def take() -> bool:
            asked.set()
            return self.slots.take(turn)

        self.results[turn] = self.pool.submit(take)
        assert asked.wait(20)
        self._settle(turn)
        self.waiting.append(turn)
        self.expect()

    def _settle(self, turn: SlotRequest) -> None:
        """The thread has its slot, or stands in the queue."""
        while turn.begun is None and turn not in self.slots._waiting:
            threading.Event().wait(0.0005)

    def give_back(self, index: int) -> None:
        if self.holding:
            self.slots.give_back(self.holding.pop(index % len(self.holding)), Outcome.ARRIVED)
            self.expect()

    def withdraw(self, index: int) -> None:
        if self.waiting:
            turn = self.waiting.pop(index % len(self.waiting))
            self.slots.withdraw(turn)
            assert not self.results[turn].result(20)
            self.expect()

    def expect(self) -> None:
        while self.waiting and len(self.holding) < self.count:
            turn = self.waiting.pop(0)
            assert self.results[turn].result(20)
            self.holding.append(turn)
        assert all(turn.begun is not None for turn in self.holding)
        assert not any(turn.begun is not None for turn in self.waiting)


@BRIEFLY
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["ask", "give_back", "withdraw"]), st.integers(0, 9))))
def test_whatever_happens_the_longest_waiting_hold_the_slots(count: int, steps: list[tuple[str, int]]) -> None:
    with ThreadPoolExecutor(max(1, len(steps))) as pool, ExitStack() as stack:
        crowd = Crowd(count, pool)

        def let_go() -> None:
            for turn in [*crowd.waiting, *crowd.holding]:
                crowd.slots.withdraw(turn)

        stack.callback(let_go)
        for name, index in steps:
            crowd.ask() if name == "ask" else getattr(crowd, name)(index)
