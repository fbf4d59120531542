"""How long a peer is avoided, when a chunk is late, and what may be asked for twice. Laws are in ``tests/property``."""

import pytest

from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth


def blamed(*incidents: tuple[Fault, float]) -> PeerHealth:
    """The peer "p" after these faults."""
    health = PeerHealth()
    for fault, at in incidents:
        health.blame("p", fault, at)
    return health


@pytest.mark.parametrize(("fault", "seconds"), [
    (Fault.SLOW, [60, 120, 240, 480, 600, 600]),
    (Fault.FAILED, [2, 4, 8, 16, 32, 60, 60]),
    (Fault.WRONG, [30, 60, 120, 240, 480, 600]),
])  # fmt: skip
def test_a_peer_is_avoided_twice_as_long_with_each_trial_that_fails(fault: Fault, seconds: list[float]) -> None:
    health, now = PeerHealth(), 0.0
    for expected in seconds:
        health.blame("p", fault, now)
        assert health.is_avoided("p", now + expected - 0.1)
        now += expected
        assert not health.is_avoided("p", now)


@pytest.mark.parametrize(("incidents", "until"), [
    ([(Fault.FAILED, 10.0)] * 8, 12.0),  # requests that fail together are one incident
    ([(Fault.FAILED, 10.0), (Fault.WRONG, 10.5), (Fault.FAILED, 11.0)], 40.5),  # a lie among them counts as one
    ([*((Fault.WRONG, at) for at in (0.0, 30.0, 90.0)), (Fault.FAILED, 210.0)], 330.0),  # nor is it made less of
])  # fmt: skip
def test_faults_at_the_same_time_count_as_the_worst_of_them(incidents: list[tuple[Fault, float]], until: float) -> None:
    health = blamed(*incidents)
    assert health.is_avoided("p", until - 0.1)
    assert not health.is_avoided("p", until)


def test_a_trial_that_fails_ends_with_its_failure() -> None:
    health = blamed((Fault.FAILED, 0.0))
    assert health.claim("p", 2.0)
    health.blame("p", Fault.FAILED, 2.5)
    assert [health.claim("p", at) for at in (6.4, 6.5)] == [False, True]


@pytest.mark.parametrize(("successes", "seconds"), [(1, 8), (2, 4), (3, 2), (4, 2), (50, 2)])
def test_each_success_halves_the_next_avoidance_until_nothing_is_remembered(successes: int, seconds: float) -> None:
    health = blamed(*((Fault.FAILED, at) for at in (0.0, 2.0, 6.0)))  # avoided for 2, 4 and 8 seconds
    for _ in range(successes):
        health.succeeded("p", 20.0)
    health.blame("p", Fault.FAILED, 30.0)
    assert health.is_avoided("p", 30.0 + seconds - 0.1)
    assert not health.is_avoided("p", 30.0 + seconds)


def test_who_is_on_trial_is_avoided_and_not_at_fault_any_more() -> None:
    health = PeerHealth()
    assert not health.is_at_fault("p", 0.0)
    health.blame("p", Fault.SLOW, 0.0)
    later = Fault.SLOW.first_seconds
    assert health.is_at_fault("p", later - 0.1)
    assert health.claim("p", later)
    assert (health.is_avoided("p", later + 0.1), health.is_at_fault("p", later + 0.1)) == (True, False)


MIB = 1024 * 1024


def after(*seconds: float) -> Deadlines:
    """What is known after chunks of 7 MiB that took so long."""
    deadlines = Deadlines(shortest=0.01, longest=30.0)
    for one in seconds:
        deadlines.came(7 * MIB, one)
    return deadlines


@pytest.mark.parametrize(("came", "usual"), [
    ([0.1] * 180 + [9.0] * 20, 0.1),  # nine of ten
    ([0.1] * 179 + [9.0] * 21, 9.0),
    ([0.1] * 8, 0.2),  # twice as much while few are known
    ([0.1] * 7, 30.0),
    ([0.0001] * 8, 0.02),  # twice the shortest
])  # fmt: skip
def test_nine_of_ten_chunks_take_what_is_usual(came: list[float], usual: float) -> None:
    assert after(*came).usual(7 * MIB) == pytest.approx(usual)


@pytest.mark.parametrize(("waits", "limit"), [
    ([], 4.0),
    ([("a", 9.0), ("b", 9.0)], 4.0),  # of six a third: they may be slow
    ([("a", 9.0), ("b", 9.0), ("b", 9.0)], 4.0),  # two requests to one peer
    ([("a", 9.0), ("b", 9.0), ("c", 1.9)], 4.0),  # the third has not kept us waiting for half of it
    ([("a", 9.0), ("b", 9.0), ("c", 2.0)], 30.0),
])  # fmt: skip
def test_peers_that_are_late_with_many_others_are_not_late(waits: list[tuple[str, float]], limit: float) -> None:
    assert after().unless_shared(4.0, waits, 6) == limit


def test_a_peer_without_others_is_late_by_itself() -> None:
    assert after().unless_shared(4.0, [], 0) == 4.0


def test_what_is_common_lately_is_told_by_the_last_sixteen_chunks() -> None:
    known = after(*[9.0] * 50, *[0.1] * 15, 9.0)
    assert known.lately(7 * MIB) == pytest.approx(0.1)
    assert known.common(7 * MIB) == pytest.approx(9.0)
    assert after(*[0.1] * 7).lately(7 * MIB) == 30.0
