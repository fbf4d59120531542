"""When to try again, and after how long."""

from __future__ import annotations

import pytest

from bdn.core.errors import NotFoundError, StoreUnavailableError, UpstreamRateLimitedError
from bdn.core.retry import RetryPolicy

POLICY = RetryPolicy(attempts=8, first_seconds=0.5, longest_seconds=10.0, longest_retry_after_seconds=60.0)
AWAY = StoreUnavailableError("connection refused")


def limited(seconds: float | None) -> UpstreamRateLimitedError:
    return UpstreamRateLimitedError("hf://o/r", seconds)


def test_the_longest_wait_doubles_with_every_failure_up_to_its_limit() -> None:
    waits = [POLICY.delay(failures, AWAY, 1.0) for failures in range(1, 8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize("random", [0.0, 0.25, 0.75])
def test_the_wait_is_any_part_of_the_longest_one(random: float) -> None:
    assert POLICY.delay(3, AWAY, random) == 2.0 * random


def test_attempts_count_the_first_one() -> None:
    assert POLICY.delay(7, AWAY, 0.5) is not None
    assert POLICY.delay(8, AWAY, 0.5) is None
    assert POLICY.delay(9, AWAY, 0.5) is None
    assert RetryPolicy(attempts=1).delay(1, AWAY, 0.5) is None


def test_a_permanent_failure_is_never_repeated() -> None:
    assert POLICY.delay(1, NotFoundError("chunk"), 0.5) is None


def test_retry_after_is_a_lower_bound_with_jitter_on_top() -> None:
    assert POLICY.delay(1, limited(30.0), 0.0) == 30.0
    assert POLICY.delay(2, limited(30.0), 0.5) == 30.5
    assert POLICY.delay(1, limited(0.0), 0.5) == 0.25


def test_a_rate_limit_without_a_time_waits_like_any_failure() -> None:
    assert POLICY.delay(2, limited(None), 0.5) == 0.5


def test_a_retry_after_beyond_the_limit_gives_up_and_the_limit_itself_does_not() -> None:
    assert POLICY.delay(1, limited(60.0), 0.0) == 60.0
    assert POLICY.delay(1, limited(60.1), 0.0) is None


def test_a_policy_that_never_gives_up_can_fail_for_years() -> None:
    patient = RetryPolicy(attempts=10**9, longest_seconds=30.0)
    assert patient.delay(10**8, AWAY, 1.0) == 30.0
