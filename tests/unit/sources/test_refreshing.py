"""Credentials that end: how often they are asked for, and what happens when they cannot be had."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from bdn.core.errors import AuthRequiredError, BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.sources.refreshing import Refreshing

NOW = 1_000_000.0
AWAY = UpstreamUnavailableError("s3://b", "STS answered 503")


@dataclass(frozen=True)
class Keys:
    number: int
    expires_at: float | None
    secret: str = "sesame"


@dataclass
class Issuer:
    """Gives out keys for ``life`` seconds, or fails as told."""

    life: float | None = 3600.0
    now: float = NOW
    asked: int = 0
    failures: list[BdnError] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def obtain(self) -> Keys:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        return Keys(self.asked, None if self.life is None else self.now + self.life)

    def refreshing(self) -> Refreshing[Keys]:
        return Refreshing(self.obtain, lambda: self.now, "role")

    async def begun(self) -> Refreshing[Keys]:
        """With the first keys."""
        keys = self.refreshing()
        await keys.get()
        return keys


@pytest.mark.parametrize(("life", "margin"), [(3600, 300), (1200, 300), (900, 225), (60, 15)])
async def test_they_are_renewed_before_they_end(life: float, margin: float) -> None:
    issuer = Issuer(life=life)
    keys = await issuer.begun()
    issuer.now = NOW + life - margin - 0.1
    assert (await keys.get()).number == 1
    issuer.now = NOW + life - margin
    assert (await keys.get()).number == 2


@pytest.mark.parametrize(("life", "passed"), [
    (3600, 0),
    (None, 10**9),  # what does not end
    (-3600, 0),  # clocks that disagree
])  # fmt: skip
async def test_they_are_asked_for_once_and_kept(life: float | None, passed: float) -> None:
    issuer = Issuer(life=life)
    keys = issuer.refreshing()
    first = await keys.get()
    issuer.now += passed
    assert all([await keys.get() is first for _ in range(50)])
    assert issuer.asked == 1


async def test_while_one_renews_the_others_go_on_with_the_old_ones() -> None:
    issuer = Issuer()
    keys = await issuer.begun()
    issuer.now += 3500
    issuer.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        renewing = group.create_task(keys.get())
        await asyncio.sleep(0)
        async with asyncio.timeout(60):  # or they would wait for ever
            assert [(await keys.get()).number for _ in range(10)] == [1] * 10
        issuer.gate.set()
    assert renewing.result().number == 2
    assert (await keys.get()).number == 2
    assert issuer.asked == 2


@pytest.mark.parametrize("has_ended", [False, True])
async def test_while_one_asks_for_the_first_or_renews_what_has_ended_the_others_wait(has_ended: bool) -> None:
    issuer = Issuer()
    keys = await issuer.begun() if has_ended else issuer.refreshing()
    issuer.now += 3600
    issuer.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(keys.get()) for _ in range(50)]
        await asyncio.sleep(0)
        issuer.gate.set()
    assert {task.result().number for task in tasks} == {issuer.asked} == {1 + has_ended}


@pytest.mark.parametrize(
    ("failure", "pause"),
    [(AWAY, 15), (UpstreamRateLimitedError("s3://b", 40.0), 40), (UpstreamRateLimitedError("s3://b"), 15)],
)
async def test_a_failure_that_may_pass_leaves_the_old_ones_in_use(
    failure: BdnError, pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Issuer()
    keys = await issuer.begun()
    issuer.now += 3400
    issuer.failures = [failure]
    assert (await keys.get()).number == 1
    issuer.now += pause - 0.1
    assert (await keys.get()).number == 1
    assert issuer.asked == 2
    issuer.now += 0.1
    assert (await keys.get()).number == 3
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert vars(record)["credentials"] == "role"
    assert "sesame" not in repr(vars(record))


@pytest.mark.parametrize(("passed", "failure"), [
    (None, AWAY),  # there were none before
    (3600, AWAY),  # it may pass, but they have ended
    (3400, AuthRequiredError("s3://b", "AccessDenied")),  # they live, but will not be given any more
])  # fmt: skip
async def test_a_failure_is_raised_and_the_next_caller_asks_again(passed: float | None, failure: BdnError) -> None:
    issuer = Issuer()
    keys = issuer.refreshing() if passed is None else await issuer.begun()
    before = issuer.asked
    issuer.now += passed or 0
    issuer.failures = [failure]
    with pytest.raises(type(failure)):
        await keys.get()
    assert (await keys.get()).number == before + 2


async def test_when_the_one_who_asks_is_canceled_another_takes_over() -> None:
    issuer = Issuer(gate=asyncio.Event())
    keys = issuer.refreshing()
    first = asyncio.ensure_future(keys.get())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(keys.get())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert issuer.gate is not None
    issuer.gate.set()
    assert (await second).number == 2
