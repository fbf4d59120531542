"""What many wait for together: a change, one piece of work by key, and one read that is as fresh as each of them needs it."""

import asyncio
import threading
import weakref

import pytest

from bdn.mirror.db.waiting import SharedRead, SharedReads, SingleFlight, ThreadRead, Watch
from tests.support.network.loops import settle


async def test_everybody_who_waits_for_the_topic_is_woken_and_nobody_else() -> None:
    watch = Watch()
    topic, another = watch.topic("a"), watch.topic("b")
    assert watch.topic("a") is topic
    waiting = [asyncio.create_task(topic.changed(0, 60)) for _ in range(2)]
    other = asyncio.create_task(another.changed(0, 60))
    await asyncio.sleep(0)
    watch.notify("a")
    assert await asyncio.gather(*waiting) == [True, True]
    assert not other.done()
    watch.stop()
    assert await other


async def test_who_is_not_woken_comes_back_when_the_time_is_over() -> None:
    watch = Watch()
    watch.notify("a")  # before anybody looked: not noticed
    assert await watch.topic("a").changed(0, 0) is False


async def test_what_changed_while_somebody_looked_is_not_missed() -> None:
    watch = Watch()
    topic = watch.topic("a")
    changes = topic.changes
    watch.notify("a")
    assert await topic.changed(changes, 60)


async def test_nothing_is_kept_of_what_nobody_waits_for() -> None:
    watch = Watch()
    waiting = asyncio.create_task(watch.topic("a").changed(0, 60))
    await asyncio.sleep(0)
    assert watch.names() == ["a"]
    watch.notify("a")
    assert await waiting
    del waiting
    assert watch.names() == []


class Work:
    """Counts how often it is done, and ends when it is told how."""

    def __init__(self) -> None:
        self.flights = SingleFlight[str, str]()
        self.outcomes: list[asyncio.Future[str]] = []

    async def __call__(self) -> str:
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.outcomes.append(outcome)
        return await outcome

    async def ask(self, *keys: str) -> list[asyncio.Task[str]]:
        """Tasks that ask for these, one after the other, and are as far as they come."""
        asking = [asyncio.create_task(self.flights.run(key, self)) for key in keys]
        await settle()
        return asking


@pytest.fixture
def work() -> Work:
    return Work()


async def test_whoever_asks_while_work_is_under_way_gets_its_result(work: Work) -> None:
    asking = await work.ask("k", "k", "k")
    work.outcomes[0].set_result("done")
    assert await asyncio.gather(*asking) == ["done"] * 3
    assert len(work.outcomes) == 1


async def test_single_flight__after_the_result__the_next_caller_begins_anew(work: Work) -> None:
    (first,) = await work.ask("k")
    work.outcomes[0].set_result("done")
    assert await first == "done"
    (again,) = await work.ask("k")
    work.outcomes[1].set_result("anew")
    assert await again == "anew"


async def test_other_keys_do_not_wait(work: Work) -> None:
    asking = await work.ask("a", "b")
    for name, outcome in zip("ab", work.outcomes, strict=True):
        outcome.set_result(name)
    assert await asyncio.gather(*asking) == ["a", "b"]


@pytest.mark.parametrize("canceled", [False, True], ids=["fails", "is canceled"])
async def test_when_the_leader_ends_without_a_result_a_waiter_takes_over(work: Work, canceled: bool) -> None:
    leader, waiter, other = await work.ask("k", "k", "k")
    if canceled:
        leader.cancel()
    else:
        work.outcomes[0].set_exception(ValueError("the leader's own"))
    await settle()
    assert len(work.outcomes) == 2
    work.outcomes[1].set_result("done")
    assert [await waiter, await other] == ["done", "done"]
    with pytest.raises(asyncio.CancelledError if canceled else ValueError):
        await leader


async def test_a_waiter_that_is_canceled_leaves_the_others_alone(work: Work) -> None:
    leader, waiter = await work.ask("k", "k")
    waiter.cancel()
    await settle()
    work.outcomes[0].set_result("done")
    assert await leader == "done"


class Sight:
    """Numbers its looks. Each takes ``seconds`` of a clock that nothing else moves, and fails when it is told so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self.seconds = 0.0
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.looks += 1
        number = self.looks
        for _ in range(3):  # others come meanwhile
            await asyncio.sleep(0)
        self.now += self.seconds
        if self.error is not None:
            raise self.error
        return number


def shared(sight: Sight, seconds: float = 0.5) -> SharedRead[int]:
    return SharedRead(sight, seconds, lambda: sight.now)


async def asked_by(count: int, look: SharedRead[int], sight: Sight) -> list[int | BaseException]:
    """What so many are answered: the first one before all others, who come while he looks."""
    first = asyncio.create_task(look.get())
    await asyncio.sleep(0)
    sight.now += 0.001
    return await asyncio.gather(first, *(look.get() for _ in range(count - 1)), return_exceptions=True)


async def test_what_was_seen_lately_is_given_until_it_is_too_old() -> None:
    sight = Sight()
    look = shared(sight)
    assert await look.get() == 1
    sight.now = 0.5
    assert await look.get() == 1
    sight.now = 0.6
    assert await look.get() == 2


async def test_who_heard_of_a_change_is_given_no_look_that_began_before() -> None:
    sight = Sight()
    look = shared(sight, 0.0)
    assert await look.get() == 1
    sight.now = 0.1
    assert await look.get() == 2


@pytest.mark.promise("load")
@pytest.mark.parametrize("age", [0.5, 0.0], ids=["lately", "anew"])
@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["at once", "slowly"])
async def test_a_hundred_who_ask_at_once_cost_two_looks_however_long_one_takes(seconds: float, age: float) -> None:
    sight = Sight()
    sight.seconds = seconds
    seen = await asked_by(100, shared(sight, age), sight)
    second = 2 if seconds or not age else 1  # a look that began before they came, and is not old
    assert seen == [1] + [second] * 99
    assert sight.looks == second


@pytest.mark.promise("load")
async def test_a_hundred_who_ask_at_once_are_told_the_error_of_two_looks() -> None:
    sight = Sight()
    sight.error = LookupError("away")
    look = shared(sight)
    assert {str(error) for error in await asked_by(100, look, sight)} == {"away"}
    assert sight.looks == 2
    sight.error, sight.now = None, 0.002
    assert await look.get() == 3


async def test_what_changed_while_one_looked_is_seen_by_who_asks_afterwards() -> None:
    sight = Sight()
    look = shared(sight)
    first = asyncio.create_task(look.get())
    await asyncio.sleep(0)
    look.forget()
    assert await first == 1
    assert await look.get() == 2


async def test_what_was_seen_is_given_until_its_topic_changes() -> None:
    watch, sight = Watch(), Sight()
    look = SharedRead(sight, 1000.0, lambda: sight.now, watch.topic("a"))
    assert [await look.get(), await look.get()] == [1, 1]
    watch.notify("b")
    assert await look.get() == 1
    watch.notify("a")
    assert [await look.get(), await look.get()] == [2, 2]


async def test_what_was_seen_lately_is_found_by_who_comes_when_nobody_holds_it() -> None:
    sight = Sight()
    looks = SharedReads[str, int](1000.0)
    assert [await looks.of("a", sight).get() for _ in range(3)] == [1, 1, 1]


async def test_who_leaves_while_he_looks_leaves_it_to_the_next() -> None:
    sight = Sight()
    look = shared(sight)
    first, second = (asyncio.create_task(look.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 2


async def test_each_question_has_its_own_look_for_as_long_as_somebody_asks() -> None:
    sights = {"a": Sight(), "b": Sight()}
    looks = SharedReads[str, int](0.0)
    first, other = looks.of("a", sights["a"]), looks.of("b", sights["b"])
    assert looks.of("a", sights["a"]) is first
    assert other is not first
    await other.get()
    held = weakref.ref(first)
    del first
    assert held() is None
    assert (sights["a"].looks, sights["b"].looks) == (0, 1)


async def test_a_read_that_blocks_holds_one_thread_however_many_ask_and_go() -> None:
    begun, go_on = [0], threading.Event()

    def read() -> str:
        begun[0] += 1
        go_on.wait()
        return "done"

    shared = ThreadRead(read)
    asking = [asyncio.create_task(shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    last = asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*asking[1:], last) == ["done"] * 3
    assert begun == [1]
    assert await shared.get() == "done"
    assert begun == [2], "it is not remembered"
