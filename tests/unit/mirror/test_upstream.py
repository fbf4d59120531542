"""Requests to upstreams: who may ask a host and who waits, when it is asked again, and where a file is read."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.limit import Outcome
from bdn.core.pace.retry import Allowance, FailureRounds, Outage, RetryPolicy
from bdn.core.source.upstream import Identity, Location, UpstreamFile
from bdn.mirror.upstream.budget import BudgetSlot, HostBudget, UpstreamBudgets
from bdn.mirror.upstream.reader import LocatedFile
from bdn.mirror.upstream.retries import UpstreamRetries
from tests.support.network.loops import settle

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
        await settle()

    def budgets(self, most: int = 4) -> UpstreamBudgets:
        return UpstreamBudgets(most, pause=self.pause, clock=lambda: self.now, draw=lambda: 0.5)


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def budget(clock: Time) -> HostBudget:
    return clock.budgets().of(HUB)


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

    async def end(self) -> None:
        self._done.set()
        await self.task
        await settle()


@asynccontextmanager
async def asking(count: int, budget: HostBudget) -> AsyncIterator[list[Asker]]:
    """So many, as far as they come; those who were not canceled end with the block."""
    askers = [Asker(budget) for _ in range(count)]
    await settle()
    yield askers
    for asker in askers:
        if not asker.task.cancelled():
            await asker.end()


def admitted(askers: list[Asker]) -> int:
    """How many have a slot: the first ones."""
    are_in = [asker.slot is not None for asker in askers]
    assert are_in == sorted(are_in, reverse=True)
    return sum(are_in)


def fail(slot: BudgetSlot | None, error: BdnError) -> None:
    assert slot is not None
    with pytest.raises(type(error)), slot.budget.request():
        raise error


def limited(seconds: float | None) -> UpstreamRateLimitedError:
    return UpstreamRateLimitedError("hf://o/r", seconds)


async def test_as_many_as_the_limit_ask_at_once_and_the_others_follow_in_order(clock: Time) -> None:
    budget = clock.budgets(most=2).of(HUB)
    async with asking(5, budget) as askers:
        assert admitted(askers) == 2
        await askers[1].end()
        assert admitted(askers) == 3
    assert budget.pace.slots == 0


async def test_hosts_are_told_apart_by_name_and_port_whatever_the_path(clock: Time) -> None:
    budgets = clock.budgets()
    assert budgets.of(HUB) is budgets.of("https://user@HUB.example/other?x=1")
    assert budgets.of(HUB) is not budgets.of("https://hub.example:8443/api/models")
    assert len(budgets.hosts) == 2


async def test_who_is_canceled_while_waiting_takes_nothing_along(clock: Time) -> None:
    budget = clock.budgets(most=1).of(HUB)
    async with asking(3, budget) as (first, second, third):
        second.task.cancel()
        await settle()
        await first.end()
        assert third.slot is not None
    assert budget.pace.slots == 0


async def test_who_is_canceled_in_the_instant_of_its_turn_passes_it_on(clock: Time) -> None:
    budget = clock.budgets(most=1).of(HUB)
    async with asking(3, budget) as (_, second, third):
        budget.release()  # the first one's
        second.task.cancel()
        await settle()
        assert second.task.cancelled()
        assert third.slot is not None
        budget.pace.take()  # so that the first one has something to give back
    assert budget.pace.slots == 0


@pytest.mark.parametrize(
    "error",
    [limited(2.0), UpstreamUnavailableError("hf://o/r", "503", 2.0)],
    ids=["429 with Retry-After", "503 with Retry-After"],
)
async def test_retry_after_holds_everybody_back_for_so_long_and_a_little_more(
    clock: Time, budget: HostBudget, error: BdnError
) -> None:
    async with budget.slot() as slot:
        fail(slot, error)
        assert not slot.is_open
    async with asking(3, budget) as askers:
        assert (admitted(askers), clock.asked) == (0, [2.25] * 3)
        await clock.pass_(2.25)
        assert admitted(askers)
    assert clock.asked == [2.25] * 3, "who has waited once does not wait again"


async def test_another_host_is_asked_meanwhile(clock: Time) -> None:
    budgets = clock.budgets()
    async with budgets.of(HUB).slot() as slot:
        fail(slot, limited(2.0))
    async with asyncio.timeout(60), budgets.of("https://cdn.example/x").slot() as other:
        assert other.is_open
    assert [budget.pace.closed_until > clock.now for budget in budgets.hosts.values()] == [True, False]


async def test_who_waited_for_a_slot_when_the_pause_began_waits_for_its_end_as_well(clock: Time) -> None:
    budget = clock.budgets(most=1).of(HUB)
    async with asking(2, budget) as (first, second):
        fail(first.slot, limited(2.0))
        await first.end()
        assert (admitted([second]), budget.pace.slots) == (0, 0)
        await clock.pass_(2.25)
        assert admitted([second])


async def test_a_pause_that_becomes_longer_is_waited_for_to_its_new_end(clock: Time, budget: HostBudget) -> None:
    async with AsyncExitStack() as stack:
        async with budget.slot() as slot:
            fail(slot, limited(2.0))
            askers = await stack.enter_async_context(asking(1, budget))
            fail(slot, limited(10.0))
        await clock.pass_(2.25)
        assert (admitted(askers), clock.asked) == (0, [2.25, 8.0])
        await clock.pass_(8.0)
        assert admitted(askers)


async def test_a_pause_of_hours_is_a_failure_at_once_and_nothing_is_sent(clock: Time, budget: HostBudget) -> None:
    async with budget.slot() as slot:
        fail(slot, limited(3600.0))
    with pytest.raises(UpstreamRateLimitedError) as raised:
        async with budget.slot():
            pytest.fail("it was let in")
    assert (raised.value.retry_after_seconds, clock.asked, budget.pace.slots) == (3600.0, [], 0)


async def test_how_a_request_ended_is_read_from_what_it_raised(clock: Time) -> None:
    budgets = clock.budgets()
    async with budgets.of(HUB).slot() as slot:
        with slot.budget.request() as asked:
            asked.size = 5
        fail(slot, UpstreamUnavailableError("hf://o/r", "reset"))
        fail(slot, limited(None))
        fail(slot, AuthRequiredError("hf://o/r", "403"))
        fail(slot, SourceChangedError("hf://o/r", "a", "412"))
        with pytest.raises(asyncio.CancelledError), slot.budget.request():
            raise asyncio.CancelledError
    counted = {Outcome.ARRIVED: 1, Outcome.FAILED: 1, Outcome.REFUSED: 1, Outcome.ANSWERED: 3}
    assert budgets.requests == counted


async def test_a_limit_that_grows_in_a_byte_thread_lets_those_in_who_wait_now(clock: Time) -> None:
    budget = clock.budgets(most=8).of(HUB)
    async with asking(8, budget) as askers:
        slots = [asker.slot for asker in askers if asker.slot is not None]
        assert len(slots) == 4

        def ask_often() -> None:
            for _ in range(3):
                with ExitStack() as stack:
                    for slot in slots:
                        stack.enter_context(slot.budget.request()).size = 10**7
                    clock.now += 1

        with ThreadPoolExecutor(1) as thread:
            thread.submit(ask_often).result()  # the loop has not heard of it yet
        newcomer = budget.acquire(0)
        assert newcomer.send(None) is not None, "it waits for its turn although there is room"
        newcomer.close()
        await settle()
        assert (budget.pace.limit, admitted(askers)) == (8, 8)


async def test_hosts_that_nobody_uses_are_forgotten_when_there_are_too_many(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.upstream.budget._HOSTS_REMEMBERED", 3)
    budgets = clock.budgets()
    async with budgets.of("https://busy").slot(), budgets.of("https://closed").slot() as slot:
        fail(slot, limited(60.0))
    async with budgets.of("https://busy").slot():
        for number in range(10):
            budgets.of(f"https://host-{number}")
        assert len(budgets.hosts) <= 3
        assert {"busy", "closed"} <= budgets.hosts.keys()


def test_a_free_slot_and_a_request_cost_next_to_nothing() -> None:
    """Fifty calls, of Python and of C, are ten microseconds; nobody gives the loop away."""
    budget = UpstreamBudgets().of(HUB)
    calls: Counter[str] = Counter()

    async def ask() -> None:
        async with budget.slot() as slot:
            with slot.budget.request() as asked:
                asked.size = 32 * 1024

    waits = [next(ask().__await__(), None) for _ in range(100)]  # whatever the first requests make is there
    last = ask().__await__()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        waits.append(next(last, None))
    finally:
        sys.setprofile(None)
    assert waits == [None] * 101
    assert calls["call"] + calls["c_call"] <= 50, calls


# --- when a failed request is made again ---

AWAY = UpstreamUnavailableError("hf://o/r", "503")


class Waits:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.retries = UpstreamRetries(UpstreamBudgets(pause=self, draw=lambda: 0.5), RetryPolicy(0))

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)

    async def ask(self, *failures: BdnError) -> None:
        """A request that has these failures before it succeeds."""
        left = list(failures)

        async def request() -> str:
            if left:
                raise left.pop(0)
            return "answer"

        assert await self.retries.ask(HUB, request) == "answer"


@pytest.fixture
def waits() -> Waits:
    return Waits()


async def test_failures_that_may_pass_are_waited_out_and_after_six_in_a_row_the_last_one_is_raised(
    waits: Waits,
) -> None:
    await waits.ask(*[AWAY] * 5)
    assert waits.seconds == [0.125, 0.25, 0.5, 1.0, 2.0]
    with pytest.raises(UpstreamUnavailableError, match="last"):
        await waits.ask(*[AWAY] * 5, UpstreamUnavailableError("hf://o/r", "last"), AWAY)
    assert len(waits.seconds) == 10


@pytest.mark.parametrize(
    "failure", [SourceChangedError("hf://o/r", "a", "etag"), StoreUnavailableError("disk full")], ids=["final", "ours"]
)
async def test_a_failure_that_a_retry_cannot_help_is_raised_at_once(waits: Waits, failure: BdnError) -> None:
    with pytest.raises(type(failure)):
        await waits.ask(failure)
    assert waits.seconds == []


async def test_a_file_that_has_failed_too_often_is_given_up(waits: Waits) -> None:
    rounds, policy = FailureRounds(Allowance(4)), waits.retries.policy
    for _ in range(4):
        await waits.retries.wait_out(AWAY, Outage(policy), time.monotonic(), rounds)
        rounds.arrived(time.monotonic())
    with pytest.raises(UpstreamUnavailableError):
        await waits.retries.wait_out(AWAY, Outage(policy), time.monotonic(), rounds)
    assert len(waits.seconds) == 4


async def test_a_request_is_asked_inside_the_budget_of_its_host_each_time_and_waits_outside() -> None:
    failures, slots = [AWAY, AWAY], []

    async def pause(_: float) -> None:
        slots.append(("pause", host.pace.slots))

    async def request() -> str:
        slots.append(("request", host.pace.slots))
        if failures:
            raise failures.pop()
        return "answer"

    retries = UpstreamRetries(UpstreamBudgets(pause=pause))
    host = retries.budgets.of(HUB)
    assert await retries.ask(HUB, request) == "answer"
    assert slots == [("request", 1), ("pause", 0), ("request", 1), ("pause", 0), ("request", 1)]
    assert retries.budgets.requests == {Outcome.FAILED: 2, Outcome.ARRIVED: 1}
    assert retries.budgets.retries == 2


# --- locations ---

FILE = UpstreamFile("a", 1, Identity.of("public", "a"), "a", "v")


class Signer:
    """A source whose locations live for an hour."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.signed = 0

    async def locate(self, file: UpstreamFile) -> Location:
        self.signed += 1
        return Location(f"https://bucket/a?{self.signed}", expires_at=self.now + 3600)


async def test_a_location_is_kept_until_it_is_about_to_expire() -> None:
    signer = Signer()
    located = LocatedFile("s3://bucket", signer, FILE, clock=lambda: signer.now)
    first = await located.location()
    signer.now += 3600 - 61
    assert await located.location() is first
    signer.now += 1
    assert (await located.location()).url == "https://bucket/a?2"


async def test_of_two_who_were_refused_with_the_same_location_one_asks_for_another() -> None:
    signer = Signer()
    located = LocatedFile("s3://bucket", signer, FILE, clock=lambda: signer.now)
    first = await located.location()
    second = await located.location(refused=first)
    assert await located.location(refused=first) is second
    assert signer.signed == 2
