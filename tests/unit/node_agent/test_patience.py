from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bdn.core.errors import StoreUnavailableError
from node_agent.fetch.deadlines import Alternative, LateError, Limits, SourceDeadline
from tests.support.agent.ring_supply import StepClock

MIB = 1024 * 1024
LIMITS = Limits(head_seconds=20.0, body_seconds=4.0)


def of_peer(
    clock: StepClock,
    may_leave: Callable[[int], bool] = lambda _: True,
    is_at_fault: Callable[[], bool] = lambda: False,
    limits: Callable[[], Limits] = lambda: LIMITS,
) -> SourceDeadline:
    return SourceDeadline.of_peer(8 * MIB, threading.Event(), Alternative(limits, may_leave, is_at_fault), clock)


def test_a_sign_of_life_ends_a_silence() -> None:
    clock = StepClock()
    patience = of_peer(clock)
    for _ in range(4):
        clock.now += 4.9
        patience.waiting()
        patience.at_work()
    assert patience.taken.head_seconds > 19


def test_towards_the_end_of_a_stage_an_answer_that_does_not_begin_is_left_early_and_nobody_is_to_blame() -> None:
    clock, is_ending = StepClock(), False
    limits, asked = Limits(head_seconds=20.0, body_seconds=4.0, ending_head_seconds=6.0), list[int]()

    def may_leave(size: int) -> bool:
        asked.append(size)
        return True

    alternative = Alternative(lambda: limits, may_leave, lambda: False, lambda: is_ending)
    patience = SourceDeadline.of_peer(8 * MIB, threading.Event(), alternative, clock)
    clock.now += 6.0
    patience.waiting()
    is_ending = True
    with pytest.raises(LateError) as caught:
        patience.waiting()
    assert not caught.value.is_fault
    assert asked == []  # nothing came, so that nothing is asked for twice


def test_a_silent_peer_is_left_and_has_failed() -> None:
    clock = StepClock()
    patience = of_peer(clock)
    clock.now += 10.0
    with pytest.raises(LateError) as caught:
        patience.waiting()
    assert caught.value.failure == "no sign of life for 10.0 s"


def test_a_silent_mirror_fails() -> None:
    clock = StepClock()
    patience = SourceDeadline(8 * MIB, threading.Event(), 20.0, clock=clock)
    clock.now += 19.9
    patience.waiting()
    clock.now += 0.1
    with pytest.raises(StoreUnavailableError, match=r"no sign of life for 20\.0 s"):
        patience.waiting()


def test_a_source_that_works_for_too_long_is_left() -> None:
    clock = StepClock()
    patience = of_peer(clock)
    for _ in range(5):
        clock.now += 4.0
        patience.at_work()
    with pytest.raises(LateError) as caught:
        patience.waiting()
    assert not caught.value.failure  # it was slow, and not wrong


def test_what_others_achieve_meanwhile_counts() -> None:
    clock, limits = StepClock(), [LIMITS]
    patience = of_peer(clock, limits=lambda: limits[-1])
    clock.now += 3.0
    patience.waiting()
    limits.append(Limits(head_seconds=2.0, body_seconds=4.0))
    with pytest.raises(LateError):
        patience.waiting()


def test_nobody_waits_for_the_head_of_a_peer_at_fault() -> None:
    clock = StepClock()
    patience = of_peer(clock, is_at_fault=lambda: True)
    clock.now += 0.25
    with pytest.raises(LateError):
        patience.waiting()


def test_a_request_to_a_peer_at_fault_that_may_not_be_left_fails_at_once() -> None:
    clock = StepClock()
    patience = of_peer(clock, lambda _: False, is_at_fault=lambda: True)
    clock.now += 0.25
    with pytest.raises(LateError) as caught:
        patience.waiting()
    assert caught.value.failure == "others had to leave it"


def test_a_body_from_a_peer_at_fault_is_left_unless_it_will_be_in_time() -> None:
    clock = StepClock()
    quick, slow = of_peer(clock, is_at_fault=lambda: True), of_peer(clock, is_at_fault=lambda: True)
    for patience in (quick, slow):
        patience.receiving(0)
    clock.now += 1.0
    quick.receiving(5 * MIB // 2)  # 8 MiB would take 3.2 s of 4
    with pytest.raises(LateError):
        slow.receiving(3 * MIB // 2)  # 5.3 s


def test_the_body_has_its_time_from_the_head_on() -> None:
    clock = StepClock()
    patience = of_peer(clock)
    clock.now += 3.0
    patience.receiving(0)
    clock.now += 3.9
    patience.receiving(MIB)
    assert patience.taken.head_seconds == 3.0
    assert patience.taken.body_seconds == pytest.approx(3.9)
    clock.now += 0.3
    with pytest.raises(LateError):
        patience.receiving(MIB)


def test_a_body_that_comes_much_slower_than_is_usual_is_left_before_its_limit() -> None:
    limits = Limits(head_seconds=20.0, body_seconds=100.0, usual_seconds=4.0)
    clock = StepClock()
    slow, busy = (of_peer(clock, limits=lambda: limits) for _ in range(2))
    for patience in (slow, busy):
        patience.receiving(0)
    clock.now += 5.9
    slow.receiving(MIB // 2)  # too soon to tell
    busy.receiving(MIB)
    clock.now += 0.3
    busy.receiving(MIB)  # 2 of 8 MiB in 6.2 s: the whole takes 24.8 s, less than 8 times what is usual
    with pytest.raises(LateError):
        slow.receiving(MIB // 2)  # 49.6 s


def test_leaving_is_asked_for_once_with_what_is_missing_and_then_it_fails_in_the_end() -> None:
    clock, asked = StepClock(), list[int]()

    def refuse(missing: int) -> bool:
        asked.append(missing)
        return False

    patience = of_peer(clock, refuse)
    patience.receiving(0)
    for _ in range(2):
        clock.now += 4.0
        patience.receiving(MIB)
    assert asked == [7 * MIB]
    clock.now += 5.0  # 13 s in all: as long again as the 4 s at which it was late, and 5 s more
    with pytest.raises(LateError) as caught:
        patience.receiving(MIB)
    assert caught.value.failure == "too slow: not done after 13.0 s"


def test_a_body_that_stalls_fails_whoever_sends_it() -> None:
    patience = SourceDeadline(8 * MIB, threading.Event(), 20.0, clock=(clock := StepClock()))
    patience.receiving(MIB)
    clock.now += 11.0
    patience.receiving(MIB)
    clock.now += 11.0
    with pytest.raises(StoreUnavailableError, match="stalled"):
        patience.receiving(1000)
