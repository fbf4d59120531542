"""How long a peer is avoided, and how it comes back."""

from __future__ import annotations

import pytest

from bdn.core.ring.peer_health import Fault, PeerHealth


def times_avoided(fault: Fault, times: int) -> list[float]:
    """Seconds of avoidance of a peer that fails each of its trials at once."""
    standing, now, seconds = PeerHealth(), 0.0, []
    for _ in range(times):
        standing.blame("p", fault, now)
        began = now
        while standing.is_avoided("p", now):
            now += 0.5
        seconds.append(now - began)
    return seconds


def test_a_peer_that_failed_is_avoided_twice_as_long_with_each_trial_that_fails() -> None:
    assert times_avoided(Fault.SLOW, 6) == [60, 120, 240, 480, 600, 600]
    assert times_avoided(Fault.FAILED, 7) == [2, 4, 8, 16, 32, 60, 60]
    assert times_avoided(Fault.WRONG, 6) == [30, 60, 120, 240, 480, 600]


def test_requests_that_fail_together_are_one_incident() -> None:
    standing = PeerHealth()
    for _ in range(8):
        standing.blame("p", Fault.FAILED, 10.0)
    assert standing.is_avoided("p", 11.9)
    assert not standing.is_avoided("p", 12.0)


def test_a_lie_among_them_counts_as_one() -> None:
    standing = PeerHealth()
    standing.blame("p", Fault.FAILED, 10.0)
    standing.blame("p", Fault.WRONG, 10.5)
    standing.blame("p", Fault.FAILED, 11.0)
    assert standing.is_avoided("p", 40.4)
    assert not standing.is_avoided("p", 40.5)


def test_a_lesser_fault_does_not_shorten_what_a_lie_has_earned() -> None:
    standing = PeerHealth()
    for now in (0.0, 30.0, 90.0):
        standing.blame("p", Fault.WRONG, now)
    standing.blame("p", Fault.FAILED, 210.0)
    assert standing.is_avoided("p", 329.9)
    assert not standing.is_avoided("p", 330.0)


def test_one_request_at_a_time_is_the_trial() -> None:
    standing = PeerHealth()
    standing.blame("p", Fault.FAILED, 0.0)
    assert not standing.claim("p", 1.9)
    assert standing.claim("p", 2.0)
    assert not standing.claim("p", 2.0)
    assert standing.is_avoided("p", 2.0)
    standing.succeeded("p", 2.5)
    assert standing.claim("p", 2.5)
    assert standing.claim("p", 2.5)


def test_a_trial_that_nobody_reports_is_forgotten_after_half_a_minute() -> None:
    standing = PeerHealth()
    standing.blame("p", Fault.FAILED, 0.0)
    assert standing.claim("p", 2.0)
    assert not standing.claim("p", 31.9)
    assert standing.claim("p", 32.0)
    assert not standing.claim("p", 32.0)


def test_a_trial_that_fails_ends_with_its_failure() -> None:
    standing = PeerHealth()
    standing.blame("p", Fault.FAILED, 0.0)
    assert standing.claim("p", 2.0)
    standing.blame("p", Fault.FAILED, 2.5)
    assert standing.is_avoided("p", 6.4)
    assert standing.claim("p", 6.5)


def test_an_older_request_that_succeeds_late_is_no_trial() -> None:
    standing = PeerHealth()
    standing.blame("p", Fault.FAILED, 0.0)
    standing.succeeded("p", 1.0)
    assert standing.is_avoided("p", 1.0)
    assert standing.claim("p", 2.0)
    assert not standing.claim("p", 2.0)


@pytest.mark.parametrize(("successes", "seconds"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 2), (50, 2)])
def test_each_success_halves_the_next_avoidance_until_nothing_is_remembered(successes: int, seconds: float) -> None:
    standing = PeerHealth()
    for now in (0.0, 2.0, 6.0):  # avoided for 2, 4 and 8 seconds
        standing.blame("p", Fault.FAILED, now)
    for _ in range(successes):
        standing.succeeded("p", 20.0)
    standing.blame("p", Fault.FAILED, 30.0)
    assert standing.is_avoided("p", 30.0 + seconds - 0.1)
    assert not standing.is_avoided("p", 30.0 + seconds)


def test_who_is_avoided_is_told_by_name() -> None:
    standing = PeerHealth()
    standing.blame("b", Fault.WRONG, 0.0)
    standing.blame("a", Fault.WRONG, 0.0)
    standing.blame("c", Fault.FAILED, 0.0)
    assert standing.avoided(5.0) == ("a", "b")


def test_who_left_the_cluster_is_forgotten() -> None:
    standing = PeerHealth()
    standing.blame("a", Fault.WRONG, 0.0)
    standing.blame("b", Fault.WRONG, 0.0)
    standing.keep(["b", "c"])
    assert standing.avoided(1.0) == ("b",)


def test_who_is_on_trial_is_not_at_fault_any_more() -> None:
    standing = PeerHealth()
    assert not standing.is_at_fault("p", 0.0)
    standing.blame("p", Fault.FAILED, 0.0)
    assert standing.is_at_fault("p", 1.9)
    assert standing.claim("p", 2.0)
    assert standing.is_avoided("p", 2.0)
    assert not standing.is_at_fault("p", 2.0)


def test_a_request_on_trial_is_not_told_that_the_peer_is_at_fault() -> None:
    standing = PeerHealth()
    standing.blame("a", Fault.SLOW, 0.0)
    later = Fault.SLOW.first_seconds
    assert standing.is_at_fault("a", later - 0.1)
    assert standing.claim("a", later)
    assert standing.is_avoided("a", later + 0.1)
    assert not standing.is_at_fault("a", later + 0.1)
