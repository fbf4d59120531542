"""When to try again, and after how long."""

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
PATIENT = RetryPolicy(attempts=10**9, longest_seconds=30.0)
AWAY = StoreUnavailableError("connection refused")


def limited(seconds: float | None) -> UpstreamRateLimitedError:
    return UpstreamRateLimitedError("hf://o/r", seconds)


def test_the_longest_wait_doubles_with_every_failure_up_to_its_limit() -> None:
    assert [POLICY.delay(failures, AWAY, 1.0) for failures in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(("policy", "failures", "error", "random", "seconds"), [
    (POLICY, 3, AWAY, 0.0, 0.0),  # any part of the longest wait
    (POLICY, 3, AWAY, 0.25, 0.5), (POLICY, 7, AWAY, 0.5, 5.0),
    (POLICY, 8, AWAY, 0.5, None),  # attempts count the first one
    (POLICY, 9, AWAY, 0.5, None), (RetryPolicy(attempts=1), 1, AWAY, 0.5, None), (PATIENT, 10**8, AWAY, 1.0, 30.0),
    (POLICY, 1, NotFoundError("chunk"), 0.5, None),
    (POLICY, 1, limited(30.0), 0.0, 30.0),  # a lower bound, with jitter on top
    (POLICY, 2, limited(30.0), 0.5, 30.5), (POLICY, 1, limited(0.0), 0.5, 0.25),
    (POLICY, 2, limited(None), 0.5, 0.5), (POLICY, 1, limited(60.0), 0.0, 60.0),
    (POLICY, 1, limited(60.1), 0.0, None),
])  # fmt: skip
def test_a_failure_is_waited_out_or_given_up(
    policy: RetryPolicy, failures: int, error: BdnError, random: float, seconds: float | None
) -> None:
    assert policy.delay(failures, error, random) == seconds


@pytest.mark.parametrize(("error", "seconds"), [
    (limited(3.0), 3.0), (limited(None), None), (UpstreamUnavailableError("hf://o/r", "503", 3.0), 3.0),
    (UpstreamUnavailableError("hf://o/r", "reset"), None), (AWAY, None),
])  # fmt: skip
def test_a_busy_upstream_is_believed_like_one_that_limits_requests(error: BdnError, seconds: float | None) -> None:
    assert asked_to_wait(error) == seconds
    assert POLICY.delay(1, error, 0.0) == (seconds or 0.0)


@pytest.mark.parametrize(("chunks", "failures"), [(0, 10), (1, 10), (9, 10), (10, 11), (1000, 110)])
def test_a_file_is_forgiven_ten_failures_and_one_more_for_every_tenth_chunk(chunks: int, failures: int) -> None:
    allowance = Allowance.of(chunks)
    assert [allowance.spend() for _ in range(failures + 2)] == [True] * failures + [False] * 2
