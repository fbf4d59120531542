"""When to try again, and after how long."""

from __future__ import annotations

import pytest

from bdn.core.errors import (
    BdnError,
    NotFoundError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import Allowance, RetryPolicy, asked_to_wait

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


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (limited(3.0), 3.0),
        (limited(None), None),
        (UpstreamUnavailableError("hf://o/r", "503", 3.0), 3.0),
        (UpstreamUnavailableError("hf://o/r", "reset"), None),
        (AWAY, None),
    ],
)
def test_a_busy_upstream_is_believed_like_one_that_limits_requests(error: BdnError, seconds: float | None) -> None:
    assert asked_to_wait(error) == seconds
    assert POLICY.delay(1, error, 0.0) == (seconds or 0.0)


@pytest.mark.parametrize(("chunks", "failures"), [(0, 10), (1, 10), (9, 10), (10, 11), (1000, 110)])
def test_a_file_is_forgiven_ten_failures_and_one_more_for_every_tenth_chunk(chunks: int, failures: int) -> None:
    allowance = Allowance.of(chunks)
    assert [allowance.spend() for _ in range(failures + 2)] == [True] * failures + [False] * 2
