"""Who may ask a host, who waits, and what a request's end does to everybody else."""

import asyncio
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.limit import Outcome
from bdn.mirror.upstream.budget import BudgetSlot, HostBudget, UpstreamBudgets

HUB = "https://hub.example/api/models"


class Time:
    """Stands still, and goes on when somebody's pause is let pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asked: list[float] = []
        self._pausing: list[asyncio.Event] = []

    async def pause(self, seconds: float) -> None:
        self.asked.append(seconds)
        over = asyncio.Event()
        self._pausing.append(over)
        await over.wait()

    async def pass_(self, seconds: float) -> None:
        self.now += seconds
        pausing, self._pausing = self._pausing, []
        for over in pausing:
            over.set()
        await turns()

    def budgets(self, most: int = 4) -> UpstreamBudgets:
        return UpstreamBudgets(most, pause=self.pause, clock=lambda: self.now, draw=lambda: 0.5)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Asker:
    """A task that holds a slot until it is told to let go."""

    def __init__(self, budget: HostBudget) -> None:
        self.slot: BudgetSlot | None = None
        self._done = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(budget))

    async def _run(self, budget: HostBudget) -> None:
        async with budget.slot() as slot:
            self.slot = slot
            await self._done.wait()

    @property
    def is_in(self) -> bool:
        return self.slot is not None

    async def end(self) -> None:
        self._done.set()
        await self.task
        await turns()


def fail(slot: BudgetSlot, error: BdnError) -> None:
    with pytest.raises(type(error)), slot.request():
        raise error


def limited(seconds: float | None) -> UpstreamRateLimitedError:
    return UpstreamRateLimitedError("hf://o/r", seconds)


async def test_as_many_as_the_limit_ask_at_once_and_the_others_follow_in_order() -> None:
    budget = Time().budgets(most=2).of(HUB)
    askers = [Asker(budget) for _ in range(5)]
    await turns()
    assert [asker.slot is not None for asker in askers] == [True, True, False, False, False]
    await askers[1].end()
    assert [asker.slot is not None for asker in askers] == [True, True, True, False, False]
    for asker in askers:
        await asker.end()
    assert budget.slots == 0


async def test_hosts_are_told_apart_by_name_and_port_whatever_the_path() -> None:
    budgets = Time().budgets()
    assert budgets.of(HUB) is budgets.of("https://user@HUB.example/other?x=1")
    assert budgets.of(HUB) is not budgets.of("https://hub.example:8443/api/models")
    assert len(budgets.now()) == 2


async def test_who_is_canceled_while_waiting_takes_nothing_along() -> None:
    budget = Time().budgets(most=1).of(HUB)
    first, second, third = (Asker(budget) for _ in range(3))
    await turns()
    second.task.cancel()
    await turns()
    await first.end()
    assert third.slot is not None
    await third.end()
    assert budget.slots == 0


async def test_who_is_canceled_in_the_instant_of_its_turn_passes_it_on() -> None:
    budget = Time().budgets(most=1).of(HUB)
    first, second, third = (Asker(budget) for _ in range(3))
    await turns()
    budget.release()  # the first one's
    second.task.cancel()
    await turns()
    assert second.task.cancelled()
    assert third.slot is not None
    budget._pace.take()  # so that the first one has something to give back
    await first.end()
    await third.end()
    assert budget.slots == 0


@pytest.mark.parametrize(
    "error",
    [limited(2.0), UpstreamUnavailableError("hf://o/r", "503", 2.0)],
    ids=["429 with Retry-After", "503 with Retry-After"],
)
async def test_retry_after_holds_everybody_back_for_so_long_and_a_little_more(error: BdnError) -> None:
    clock = Time()
    budget = clock.budgets().of(HUB)
    async with budget.slot() as slot:
        fail(slot, error)
        assert not slot.is_open
    askers = [Asker(budget) for _ in range(3)]
    await turns()
    assert [asker.slot for asker in askers] == [None] * 3
    assert clock.asked == [2.25] * 3
    await clock.pass_(2.25)
    assert [asker.slot for asker in askers].count(None) < 3
    for asker in askers:
        await asker.end()
    assert clock.asked == [2.25] * 3, "who has waited once does not wait again"


async def test_another_host_is_asked_meanwhile() -> None:
    budgets = Time().budgets()
    async with budgets.of(HUB).slot() as slot:
        fail(slot, limited(2.0))
    async with asyncio.timeout(5), budgets.of("https://cdn.example/x").slot() as other:
        assert other.is_open
    assert budgets.closed() == 1


async def test_who_waited_for_a_slot_when_the_pause_began_waits_for_its_end_as_well() -> None:
    clock = Time()
    budget = clock.budgets(most=1).of(HUB)
    first, second = Asker(budget), Asker(budget)
    await turns()
    assert first.slot is not None
    fail(first.slot, limited(2.0))
    await first.end()
    assert (second.is_in, budget.slots) == (False, 0)
    await clock.pass_(2.25)
    assert second.is_in
    await second.end()


async def test_a_pause_that_becomes_longer_is_waited_for_to_its_new_end() -> None:
    clock = Time()
    budget = clock.budgets().of(HUB)
    async with budget.slot() as slot:
        fail(slot, limited(2.0))
        asker = Asker(budget)
        await turns()
        fail(slot, limited(10.0))
    await clock.pass_(2.25)
    assert (asker.is_in, clock.asked) == (False, [2.25, 8.0])
    await clock.pass_(8.0)
    assert asker.is_in
    await asker.end()


async def test_a_pause_of_hours_is_a_failure_at_once_and_nothing_is_sent() -> None:
    clock = Time()
    budget = clock.budgets().of(HUB)
    async with budget.slot() as slot:
        fail(slot, limited(3600.0))
    with pytest.raises(UpstreamRateLimitedError) as raised:
        async with budget.slot():
            pytest.fail("it was let in")
    assert raised.value.retry_after_seconds == 3600.0
    assert clock.asked == []
    assert budget.slots == 0


async def test_how_a_request_ended_is_read_from_what_it_raised() -> None:
    budgets = Time().budgets()
    async with budgets.of(HUB).slot() as slot:
        with slot.request() as asked:
            asked.size = 5
        fail(slot, UpstreamUnavailableError("hf://o/r", "reset"))
        fail(slot, limited(None))
        fail(slot, AuthRequiredError("hf://o/r", "403"))
        fail(slot, SourceChangedError("hf://o/r", "a", "412"))
        with pytest.raises(asyncio.CancelledError), slot.request():
            raise asyncio.CancelledError
    counted = dict(budgets.totals.requests)
    assert counted == {Outcome.ARRIVED: 1, Outcome.FAILED: 1, Outcome.REFUSED: 1, Outcome.ANSWERED: 3}


async def test_a_limit_that_grows_in_a_byte_thread_lets_those_in_who_wait_now() -> None:
    clock = Time()
    budget = clock.budgets(most=8).of(HUB)
    askers = [Asker(budget) for _ in range(8)]
    await turns()
    slots = [asker.slot for asker in askers if asker.slot is not None]
    assert len(slots) == 4

    def ask_often() -> None:
        for _ in range(3):
            asking = [slot.request() for slot in slots]
            for request in asking:
                request.__enter__()
            clock.now += 1
            for request in asking:
                request.size = 10**7
                request.__exit__(None, None, None)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(ask_often).result()  # the loop has not heard of it yet
    newcomer = budget.acquire(0)
    assert newcomer.send(None) is not None, "it waits for its turn although there is room"
    newcomer.close()
    await turns()
    assert budget.limit == 8
    assert all(asker.slot is not None for asker in askers)
    for asker in askers:
        await asker.end()


async def test_hosts_that_nobody_uses_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bdn.mirror.upstream.budget._HOSTS_REMEMBERED", 3)
    budgets = Time().budgets()
    async with budgets.of("https://busy").slot(), budgets.of("https://closed").slot() as slot:
        fail(slot, limited(60.0))
    async with budgets.of("https://busy").slot():
        for number in range(10):
            budgets.of(f"https://host-{number}")
        assert len(budgets.now()) <= 3
        assert {"busy", "closed"} <= {budget.host for budget in budgets.now()}


def test_a_free_slot_and_a_request_cost_next_to_nothing() -> None:
    """Fifty calls, of Python and of C, are ten microseconds; nobody gives the loop away."""
    budget = UpstreamBudgets(16).of(HUB)
    calls: Counter[str] = Counter()

    async def ask() -> None:
        async with budget.slot() as slot:
            with slot.request() as asked:
                asked.size = 32 * 1024

    waits = [next(ask().__await__(), None) for _ in range(100)]  # whatever the first requests make is there
    asking = ask().__await__()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        waits.append(next(asking, None))
    finally:
        sys.setprofile(None)
    assert waits == [None] * 101
    assert calls["call"] + calls["c_call"] <= 50, calls
