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
from bdn.mirror.patience import Patience

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
