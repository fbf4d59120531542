"""How slow a body may come, and when the rest of a range is asked for at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.retry import Persistence, ResumePolicy, StallPolicy, StallWindow
from tests.support.network.hypothesis import BRIEFLY

MIB = 1024 * 1024
POLICY = StallPolicy(least_bytes=1000, window_seconds=10)


def seconds_until_cut(rate_bytes_per_second: int, policy: StallPolicy, *, size: int = 8 * MIB) -> int | None:
    """When a body that brings so much each second is cut; None when it ends first."""
    window, sent = StallWindow(policy, size, 100.0), 0
    for second in range(1, size // rate_bytes_per_second + 2):
        count = min(rate_bytes_per_second, size - sent)
        sent += count
        if window.judge(count, 100.0 + second):
            return second
    return None


def test_a_trickle_of_one_kilobyte_a_second_is_cut_after_one_window() -> None:
    assert seconds_until_cut(1024, StallPolicy()) == 10


def test_a_slow_but_honest_link_is_not_cut() -> None:
    assert seconds_until_cut(MIB, StallPolicy()) is None
    assert seconds_until_cut(MIB // 100, StallPolicy()) is None, "nor one of a hundred connections that share it"


def test_within_a_window_nothing_is_cut() -> None:
    window = StallWindow(POLICY, 5000, 0.0)
    assert window.judge(0, 9.99) == ""
    assert window.judge(999, 10.0) == "stalled: 999 bytes in 10.0 s"


def test_each_window_counts_for_itself() -> None:
    window = StallWindow(POLICY, 10_000, 0.0)
    assert window.judge(5000, 10.0) == ""
    assert window.judge(999, 19.9) == ""
    assert window.judge(0, 20.0) == "stalled: 999 bytes in 10.0 s"


@pytest.mark.parametrize(("missing", "came", "is_cut"), [(10, 9, True), (10, 10, False), (1000, 999, True)])
def test_of_a_rest_that_is_smaller_than_the_least_all_must_come(missing: int, came: int, is_cut: bool) -> None:
    window = StallWindow(POLICY, missing, 0.0)
    assert bool(window.judge(came, 10.0)) == is_cut


@pytest.mark.parametrize(("least", "seconds"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_policy_that_never_or_always_cuts_does_not_exist(least: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="not a stall policy"):
        StallPolicy(least, seconds)


def persistence(resumes: int = 3, poor_stalls: int = 1) -> Persistence:
    return Persistence(ResumePolicy(resumes, poor_stalls), POLICY)


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
