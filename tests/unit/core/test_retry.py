"""When to try again, and after how long; how slow a body may come."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import (
    BdnError,
    NotFoundError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import (
    Allowance,
    FailureRounds,
    Outage,
    Persistence,
    ResumePolicy,
    RetryPolicy,
    StallPolicy,
    StallWindow,
    asked_to_wait,
)
from bdn.net.unreachable import UpstreamHostUnknownError
from tests.support.network.hypothesis import BRIEFLY

POLICY = RetryPolicy(0, attempts=8, first_seconds=0.5, longest_seconds=10.0, longest_retry_after_seconds=60.0)
PATIENT = RetryPolicy(10.0**9, longest_seconds=30.0)
AWAY = StoreUnavailableError("connection refused")


def limited(seconds: float | None) -> UpstreamRateLimitedError:
    return UpstreamRateLimitedError("hf://o/r", seconds)


def delay(policy: RetryPolicy, failures: int, error: BdnError, random: float) -> float | None:
    """After the n-th failure in a row."""
    return Outage(policy, failures - 1).delay(error, 0.0, random)


def test_the_longest_wait_doubles_with_every_failure_up_to_its_limit() -> None:
    assert [delay(POLICY, failures, AWAY, 1.0) for failures in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(("policy", "failures", "error", "random", "seconds"), [
    (POLICY, 3, AWAY, 0.0, 0.0),  # any part of the longest wait
    (POLICY, 3, AWAY, 0.25, 0.5), (POLICY, 7, AWAY, 0.5, 5.0),
    (POLICY, 8, AWAY, 0.5, None),  # attempts count the first one
    (POLICY, 9, AWAY, 0.5, None), (RetryPolicy(0, attempts=1), 1, AWAY, 0.5, None), (PATIENT, 10**8, AWAY, 1.0, 30.0),
    (POLICY, 1, NotFoundError("chunk"), 0.5, None),
    (POLICY, 1, limited(30.0), 0.0, 30.0),  # a lower bound, with jitter on top
    (POLICY, 2, limited(30.0), 0.5, 30.5), (POLICY, 1, limited(0.0), 0.5, 0.25),
    (POLICY, 2, limited(None), 0.5, 0.5), (POLICY, 1, limited(60.0), 0.0, 60.0),
    (POLICY, 1, limited(60.1), 0.0, None),
])  # fmt: skip
def test_a_failure_is_waited_out_or_given_up(
    policy: RetryPolicy, failures: int, error: BdnError, random: float, seconds: float | None
) -> None:
    assert delay(policy, failures, error, random) == seconds


@pytest.mark.parametrize(("error", "seconds"), [
    (limited(3.0), 3.0), (limited(None), None), (UpstreamUnavailableError("hf://o/r", "503", 3.0), 3.0),
    (UpstreamUnavailableError("hf://o/r", "reset"), None), (AWAY, None),
])  # fmt: skip
def test_a_busy_upstream_is_believed_like_one_that_limits_requests(error: BdnError, seconds: float | None) -> None:
    assert asked_to_wait(error) == seconds
    assert delay(POLICY, 1, error, 0.0) == (seconds or 0.0)


@pytest.mark.parametrize(("error", "taken", "waits"), [
    (AWAY, 0.0, [1.0, 2.0, 4.0, 3.0]),  # the last attempt is made when the time is over
    (AWAY, 4.0, [1.0, 2.0]),  # requests that fail late are part of the outage, but for the first
    (limited(50.0), 0.0, [51.0, 52.0, 54.0, 53.0]),  # pauses that were asked for are not
])  # fmt: skip
def test_an_outage_is_given_up_when_its_time_is_over(error: BdnError, taken: float, waits: list[float]) -> None:
    outage = Outage(RetryPolicy(10.0, attempts=2, first_seconds=1.0))
    assert [outage.delay(error, taken, 1.0) for _ in range(len(waits) + 1)] == [*waits, None]


@pytest.mark.parametrize(("chunks", "rounds"), [(0, 10), (1, 10), (9, 10), (10, 11), (1000, 110)])
def test_a_file_is_forgiven_ten_rounds_of_failures_and_one_more_for_every_tenth_chunk(chunks: int, rounds: int) -> None:
    file, forgiven = FailureRounds.of(chunks), []
    for now in range(rounds + 2):
        forgiven.append(file.failed(now, now + 0.1))
        file.arrived(now + 0.5)
    assert forgiven == [True] * rounds + [False] * 2


@pytest.mark.parametrize(("happenings", "used"), [
    ("fail 0 1, fail 0 2, fail 0 3", 1),  # all that were in flight
    ("fail 0 1, fail 1.5 2, fail 2.5 3", 1),  # and again, and again
    ("fail 0 1, arrive 0, fail 2 3", 1),  # one that was sent before does not end it
    ("fail 0 1, arrive 1.5, fail 0 2", 1),  # nor does one begin another
    ("fail 0 1, arrive 1.5, fail 2 3", 2),
])  # fmt: skip
def test_a_round_ends_when_a_request_that_was_sent_after_its_begin_arrives(happenings: str, used: int) -> None:
    rounds = FailureRounds(Allowance(10))
    for happening in happenings.split(", "):
        what, *times = happening.split()
        (rounds.failed if what == "fail" else rounds.arrived)(*map(float, times))
    assert rounds.allowance.used == used


def play(outage_seconds: float, *, chunks: int = 256, at_once: int = 16) -> tuple[float, int]:
    """A file whose upstream is away from second 1 on; a request takes a tenth. When the file is there, and the rounds that it cost.

    Raises ``TimeoutError`` if it is given up.
    """
    rounds, now = FailureRounds.of(chunks), 0.0
    asked = [(0.05 * number, number, Outage(RetryPolicy())) for number in range(at_once)]
    following = at_once
    while asked:
        sent, chunk, outage = heapq.heappop(asked)
        now = sent + 0.1
        if 1 <= now < 1 + outage_seconds:
            wait = outage.delay(AWAY, 0.1, (chunk * 0.37 + outage.failures * 0.61) % 1)
            if wait is None or not rounds.failed(sent, now):
                raise TimeoutError
            heapq.heappush(asked, (now + wait, chunk, outage))
            continue
        rounds.arrived(sent)
        if following < chunks:
            heapq.heappush(asked, (now, following, Outage(RetryPolicy())))
            following += 1
    return now, rounds.allowance.used


@pytest.mark.parametrize("seconds", [3, 30, 60, 115])
def test_an_outage_costs_its_time_and_one_round_however_many_requests_it_fails(seconds: float) -> None:
    end, rounds = play(seconds)
    assert (rounds, end < 1 + seconds + 11) == (1, True), end


def test_an_upstream_that_does_not_come_back_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        play(1000)


MIB = 1024 * 1024
STALL = StallPolicy(least_bytes=1000, window_seconds=10)


def seconds_until_cut(rate_bytes_per_second: int, policy: StallPolicy, *, size: int = 8 * MIB) -> int | None:
    """When a body that brings so much each second is cut; None when it ends first."""
    window, sent = StallWindow(policy, size, 100.0), 0
    for second in range(1, size // rate_bytes_per_second + 2):
        count = min(rate_bytes_per_second, size - sent)
        sent += count
        if window.judge(count, 100.0 + second):
            return second
    return None


@pytest.mark.parametrize(("rate", "seconds"), [(1024, 10), (MIB, None), (MIB // 100, None)])
def test_a_trickle_is_cut_after_one_window_and_one_of_a_hundred_that_share_a_link_is_not(
    rate: int, seconds: int | None
) -> None:
    assert seconds_until_cut(rate, StallPolicy()) == seconds


@pytest.mark.parametrize(("missing", "steps"), [
    (5000, [(0, 9.99, ""), (999, 10.0, "stalled: 999 bytes in 10.0 s")]),  # within a window nothing is cut
    (10_000, [(5000, 10.0, ""), (999, 19.9, ""), (0, 20.0, "stalled: 999 bytes in 10.0 s")]),  # each counts for itself
    # Of a rest that is smaller than the least, all must come.
    (10, [(10, 10.0, "")]), (10, [(9, 10.0, "stalled: 9 bytes in 10.0 s")]),
    (1000, [(999, 10.0, "stalled: 999 bytes in 10.0 s")]),
])  # fmt: skip
def test_a_window_that_brings_too_little_has_stalled(missing: int, steps: list[tuple[int, float, str]]) -> None:
    window = StallWindow(STALL, missing, 0.0)
    assert [window.judge(count, now) for count, now, _ in steps] == [said for *_, said in steps]


@pytest.mark.parametrize(("least", "seconds"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_policy_that_never_or_always_cuts_does_not_exist(least: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="not a stall policy"):
        StallPolicy(least, seconds)


def persistence(resumes: int = 3, poor_stalls: int = 1) -> Persistence:
    return Persistence(ResumePolicy(resumes, poor_stalls), STALL)


@BRIEFLY
@given(
    ends=st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=30),
    resumes=st.integers(0, 8),
    poor_stalls=st.integers(0, 3),
)
def test_there_are_never_more_requests_in_a_row_than_the_policy_says(
    ends: list[tuple[int, bool]], resumes: int, poor_stalls: int
) -> None:
    judge, asked, poor = persistence(resumes, poor_stalls), 1, 0
    for gained, stalled in ends:
        poor += stalled and gained < 1000
        if not judge.goes_on(gained, stalled=stalled):
            assert gained == 0 or asked > resumes or poor > poor_stalls
            break
        asked += 1
        assert gained > 0
        assert poor <= poor_stalls
    assert asked <= resumes + 1


def test_a_failure_that_passes_soon_or_not_at_all_is_given_up_after_a_few_in_a_row() -> None:
    outage = Outage(RetryPolicy(attempts=3))
    unknown, reset = UpstreamHostUnknownError("hf://o/r", "no host"), UpstreamUnavailableError("hf://o/r", "reset")
    assert [outage.delay(error, 0, 0) is None for error in (unknown, unknown, reset, unknown, unknown, unknown)] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
