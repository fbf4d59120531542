"""When an upstream is asked again, and after how long."""

import pytest

from bdn.core.errors import (
    BdnError,
    SourceChangedError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.limit import Outcome
from bdn.core.pace.retry import Allowance
from bdn.mirror.upstream.budget import UpstreamRetries

URL = "https://hub.example/page"
AWAY = UpstreamUnavailableError("hf://o/r", "503")


class Waits:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.retries = UpstreamRetries(self, draw=lambda: 0.5)

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)

    async def ask(self, *failures: BdnError) -> None:
        """A request that has these failures before it succeeds."""
        left = list(failures)

        async def request() -> str:
            if left:
                raise left.pop(0)
            return "answer"

        assert await self.retries.ask(URL, request) == "answer"


@pytest.mark.parametrize("failures", range(6))
async def test_failures_that_may_pass_are_waited_out_longer_each_time(failures: int) -> None:
    waits = Waits()
    await waits.ask(*[AWAY] * failures)
    assert waits.seconds == [0.125, 0.25, 0.5, 1.0, 2.0][:failures]


async def test_after_six_failures_in_a_row_the_last_one_is_raised() -> None:
    waits = Waits()
    with pytest.raises(UpstreamUnavailableError, match="last"):
        await waits.ask(*[AWAY] * 5, UpstreamUnavailableError("hf://o/r", "last"), AWAY)
    assert len(waits.seconds) == 5


async def test_retry_after_is_honoured_up_to_five_minutes() -> None:
    waits = Waits()
    failure = UpstreamUnavailableError("hf://o/r", "503", 300.0)
    await waits.retries.wait_out(failure, 1)
    assert waits.seconds == [300.125]
    with pytest.raises(UpstreamRateLimitedError):
        await waits.retries.wait_out(UpstreamRateLimitedError("hf://o/r", 301.0), 1)


@pytest.mark.parametrize(
    "failure", [SourceChangedError("hf://o/r", "a", "etag"), StoreUnavailableError("disk full")], ids=["final", "ours"]
)
async def test_a_failure_that_a_retry_cannot_help_is_raised_at_once(failure: BdnError) -> None:
    waits = Waits()
    with pytest.raises(type(failure)):
        await waits.ask(failure)
    assert waits.seconds == []


async def test_a_file_that_has_failed_too_often_is_given_up() -> None:
    waits, allowance = Waits(), Allowance(4)
    for _ in range(4):
        await waits.retries.wait_out(AWAY, 1, allowance)
    with pytest.raises(UpstreamUnavailableError):
        await waits.retries.wait_out(AWAY, 1, allowance)
    assert len(waits.seconds) == 4


async def test_a_request_is_asked_inside_the_budget_of_its_host_each_time_and_waits_outside() -> None:
    failures, slots = [AWAY, AWAY], []

    async def pause(_: float) -> None:
        slots.append(("pause", budget.slots))

    async def request() -> str:
        slots.append(("request", budget.slots))
        if failures:
            raise failures.pop()
        return "answer"

    retries = UpstreamRetries(pause, draw=lambda: 0.5)
    budget = retries.budgets.of(URL)
    assert await retries.ask(URL, request) == "answer"
    assert slots == [("request", 1), ("pause", 0), ("request", 1), ("pause", 0), ("request", 1)]
    assert retries.budgets.totals.requests == {Outcome.FAILED: 2, Outcome.ARRIVED: 1}
    assert retries.budgets.totals.retries == 2
