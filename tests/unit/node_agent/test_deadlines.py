"""How long one request is waited for: when a peer is left, and when a source has failed."""

import threading
from collections.abc import Callable

import pytest

from bdn.core.errors import StoreUnavailableError
from node_agent.fetch.peers import Alternative, LateError, Limits, SourceDeadline
from tests.fakes.clock import Clock

MIB = 1024 * 1024
LIMITS = Limits(head_seconds=20.0, body_seconds=4.0)


def of_peer(
    clock: Clock,
    may_leave: Callable[[int], bool] = lambda _: True,
    limits: Callable[[], Limits] = lambda: LIMITS,
    is_ending: Callable[[], bool] = lambda: False,
    *,
    is_at_fault: bool = False,
) -> SourceDeadline:
    alternative = Alternative(limits, may_leave, lambda: is_at_fault, is_ending)
    return SourceDeadline.of_peer(8 * MIB, threading.Event(), alternative, clock)


def of_mirror(clock: Clock) -> SourceDeadline:
    return SourceDeadline.of_mirror(8 * MIB, threading.Event(), clock)


def answering(is_allowed: bool, asked: list[int]) -> Callable[[int], bool]:
    """Whether the source may be left; notes the bytes that would be asked for again."""

    def may_leave(missing: int) -> bool:
        asked.append(missing)
        return is_allowed

    return may_leave


def left(wait: Callable[[], None]) -> LateError:
    with pytest.raises(LateError) as caught:
        wait()
    return caught.value


def test_a_silent_peer_is_left_and_has_failed_and_a_sign_of_life_ends_a_silence() -> None:
    deadline = of_peer(clock := Clock())
    for _ in range(2):
        clock.now += 9.9
        deadline.waiting()
        deadline.at_work()
    assert deadline.taken.head_seconds == pytest.approx(19.8)
    silent = of_peer(clock)
    clock.now += 10.0
    assert left(silent.waiting).failure == "no response for 10.0 s"


def test_a_silent_mirror_fails() -> None:
    deadline = of_mirror(clock := Clock())
    clock.now += 19.9
    deadline.waiting()
    clock.now += 0.1
    with pytest.raises(StoreUnavailableError, match=r"no response for 20\.0 s"):
        deadline.waiting()


def test_a_peer_that_works_for_too_long_is_left_and_has_not_failed() -> None:
    deadline = of_peer(clock := Clock())
    for _ in range(5):
        clock.now += 4.0
        deadline.at_work()
    assert not left(deadline.waiting).failure


def test_what_others_achieve_meanwhile_counts() -> None:
    limits = [LIMITS]
    deadline = of_peer(clock := Clock(), limits=lambda: limits[-1])
    clock.now += 3.0
    deadline.waiting()
    limits.append(Limits(head_seconds=2.0, body_seconds=4.0))
    left(deadline.waiting)


def test_towards_the_end_of_a_stage_an_answer_that_does_not_begin_is_left_early_and_nobody_is_to_blame() -> None:
    limits, asked, is_ending = Limits(20.0, 4.0, ending_head_seconds=6.0), list[int](), list[bool]()
    deadline = of_peer(clock := Clock(), answering(True, asked), lambda: limits, lambda: bool(is_ending))
    clock.now += 6.0
    deadline.waiting()
    is_ending.append(True)
    assert not left(deadline.waiting).is_fault
    assert asked == []  # nothing came, so that nothing is asked for twice


@pytest.mark.parametrize(("may_leave", "failure"), [(True, ""), (False, "other reads had to leave this peer")])
def test_nobody_waits_for_the_head_of_a_peer_at_fault(may_leave: bool, failure: str) -> None:
    deadline = of_peer(clock := Clock(), lambda _: may_leave, is_at_fault=True)
    clock.now += 0.25
    assert left(deadline.waiting).failure == failure


def test_a_body_from_a_peer_at_fault_is_left_unless_it_will_be_in_time() -> None:
    clock = Clock()
    quick, slow = (of_peer(clock, is_at_fault=True) for _ in range(2))
    for deadline in (quick, slow):
        deadline.receiving(0)
    clock.now += 1.0
    quick.receiving(5 * MIB // 2)  # 8 MiB would take 3.2 s of 4
    left(lambda: slow.receiving(3 * MIB // 2))  # 5.3 s


def test_the_body_has_its_time_from_the_head_on() -> None:
    deadline = of_peer(clock := Clock())
    clock.now += 3.0
    deadline.receiving(0)
    clock.now += 3.9
    deadline.receiving(MIB)
    assert deadline.taken.head_seconds == 3.0
    assert deadline.taken.body_seconds == pytest.approx(3.9)
    clock.now += 0.3
    left(lambda: deadline.receiving(MIB))


def test_a_body_that_comes_much_slower_than_is_usual_is_left_before_its_limit() -> None:
    limits, clock = Limits(20.0, 100.0, usual_seconds=4.0), Clock()
    slow, busy = (of_peer(clock, limits=lambda: limits) for _ in range(2))
    for deadline in (slow, busy):
        deadline.receiving(0)
    clock.now += 5.9
    slow.receiving(MIB // 2)  # too soon to tell
    busy.receiving(MIB)
    clock.now += 0.3
    busy.receiving(MIB)  # 2 of 8 MiB in 6.2 s: the whole takes 24.8 s, less than 8 times what is usual
    left(lambda: slow.receiving(MIB // 2))  # 49.6 s


def test_leaving_is_asked_for_once_with_what_is_missing_and_then_it_fails_in_the_end() -> None:
    asked = list[int]()
    deadline = of_peer(clock := Clock(), answering(False, asked))
    deadline.receiving(0)
    for _ in range(2):
        clock.now += 4.0
        deadline.receiving(MIB)
    assert asked == [7 * MIB]
    clock.now += 5.0  # 13 s in all: as long again as the 4 s at which it was late, and 5 s more
    assert left(lambda: deadline.receiving(MIB)).failure == "too slow: not done after 13.0 s"


def test_a_body_that_stalls_fails_whoever_sends_it() -> None:
    deadline = of_mirror(clock := Clock())
    for _ in range(2):
        deadline.receiving(MIB)
        clock.now += 11.0
    with pytest.raises(StoreUnavailableError, match="stalled"):
        deadline.receiving(1000)
