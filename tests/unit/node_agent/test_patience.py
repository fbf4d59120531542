from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bdn.core.errors import StoreUnavailableError
from node_agent.ring.patience import LateError, Limits, SourcePatience
from tests.support.ring_supply import StepClock

MIB = 1024 * 1024
LIMITS = Limits(head_seconds=20.0, body_seconds=4.0)


def with_peer(clock: StepClock, may_leave: Callable[[int], bool] = lambda _: True) -> SourcePatience:
    return SourcePatience.with_peer(8 * MIB, threading.Event(), LIMITS, may_leave, clock)


def test_a_sign_of_life_ends_a_silence() -> None:
    clock = StepClock()
    patience = with_peer(clock)
    for _ in range(4):
        clock.now += 4.9
        patience.waiting()
        patience.at_work()
    assert patience.taken.head_seconds > 19


def test_a_silent_source_fails() -> None:
    clock = StepClock()
    patience = with_peer(clock)
    clock.now += 5.0
    with pytest.raises(StoreUnavailableError, match=r"no sign of life for 5\.0 s"):
        patience.waiting()


def test_a_source_that_works_for_too_long_is_left() -> None:
    clock = StepClock()
    patience = with_peer(clock)
    for _ in range(5):
        clock.now += 4.0
        patience.at_work()
    with pytest.raises(LateError):
        patience.waiting()


def test_the_body_has_its_time_from_the_head_on() -> None:
    clock = StepClock()
    patience = with_peer(clock)
    clock.now += 3.0
    patience.receiving(0)
    clock.now += 3.9
    patience.receiving(MIB)
    assert (patience.taken.head_seconds, patience.taken.body_seconds) == (3.0, pytest.approx(3.9))
    clock.now += 0.2
    with pytest.raises(LateError):
        patience.receiving(MIB)


def test_leaving_is_asked_for_once_with_what_is_missing_and_then_it_fails_in_the_end() -> None:
    clock, asked = StepClock(), list[int]()

    def refuse(missing: int) -> bool:
        asked.append(missing)
        return False

    patience = with_peer(clock, refuse)
    patience.receiving(0)
    for _ in range(4):
        clock.now += 8.0
        patience.receiving(MIB)
    assert asked == [7 * MIB]
    clock.now += 2.0
    with pytest.raises(StoreUnavailableError, match="too slow: 3145728 bytes are missing"):
        patience.receiving(MIB)


def test_a_body_that_stalls_fails_whoever_sends_it() -> None:
    patience = SourcePatience(8 * MIB, threading.Event(), 20.0, clock=(clock := StepClock()))
    patience.receiving(MIB)
    clock.now += 11.0
    patience.receiving(MIB)
    clock.now += 11.0
    with pytest.raises(StoreUnavailableError, match="stalled"):
        patience.receiving(1000)
