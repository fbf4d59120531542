"""When an upstream is asked again, and after how long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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
from bdn.mirror.upstream.retries import Patience

AWAY = UpstreamUnavailableError("hf://o/r", "503")


def failing(*failures: BdnError) -> Callable[[], Awaitable[str]]:
    left = list(failures)

    async def ask() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return ask


class Waits:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def patience(self) -> Patience:
        return Patience(self, draw=lambda: 0.5)


async def test_an_answer_costs_no_wait() -> None:
    waits = Waits()
    assert await waits.patience().run(failing()) == "answer"
    assert waits.seconds == []


async def test_failures_that_may_pass_are_waited_out_longer_each_time() -> None:
    waits = Waits()
    assert await waits.patience().run(failing(*[AWAY] * 5)) == "answer"
    assert waits.seconds == [0.125, 0.25, 0.5, 1.0, 2.0]


async def test_after_six_failures_in_a_row_the_last_one_is_told() -> None:
    waits = Waits()
    with pytest.raises(UpstreamUnavailableError, match="last"):
        await waits.patience().run(failing(*[AWAY] * 5, UpstreamUnavailableError("hf://o/r", "last"), AWAY))
    assert len(waits.seconds) == 5


async def test_an_upstream_that_says_how_long_is_believed_up_to_five_minutes() -> None:
    waits = Waits()
    await waits.patience().run(failing(UpstreamRateLimitedError("hf://o/r", 300.0)))
    assert waits.seconds == [300.125]
    with pytest.raises(UpstreamRateLimitedError):
        await waits.patience().run(failing(UpstreamRateLimitedError("hf://o/r", 301.0)))


@pytest.mark.parametrize(
    "failure", [SourceChangedError("hf://o/r", "a", "etag"), StoreUnavailableError("disk full")], ids=["final", "ours"]
)
async def test_what_asking_again_cannot_help_is_told_at_once(failure: BdnError) -> None:
    waits = Waits()
    with pytest.raises(type(failure)):
        await waits.patience().run(failing(failure))
    assert waits.seconds == []


async def test_a_file_that_has_failed_too_often_is_given_up_whichever_of_its_requests_fails() -> None:
    waits = Waits()
    patience, allowance = waits.patience(), Allowance(4)
    for _ in range(2):
        assert await patience.run(failing(AWAY, AWAY), allowance) == "answer"
    with pytest.raises(UpstreamUnavailableError):
        await patience.run(failing(AWAY), allowance)
    assert len(waits.seconds) == 4


async def test_a_request_is_asked_inside_the_budget_of_its_host_each_time_and_waits_outside() -> None:
    answer, slots = failing(AWAY, AWAY), []

    async def pause(_: float) -> None:
        slots.append(("pause", budget.slots))

    async def request() -> str:
        slots.append(("request", budget.slots))
        return await answer()

    patience = Patience(pause, draw=lambda: 0.5)
    budget = patience.budgets.of("https://hub.example/page")
    assert await patience.ask("https://hub.example/page", request) == "answer"
    assert slots == [("request", 1), ("pause", 0), ("request", 1), ("pause", 0), ("request", 1)]
    assert patience.budgets.totals.requests == {Outcome.FAILED: 2, Outcome.ARRIVED: 1}
    assert patience.budgets.totals.retries == 2
