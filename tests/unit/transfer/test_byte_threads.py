"""Work in a bounded number of threads, as many at once as pay off; cancelling it leaves nothing behind that still runs."""

import asyncio
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from threading import Barrier, Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.transfer.byte_threads import BufferPool, ByteThreads, Pacer, SlotRequest, Slots, pacer
from tests.support.network.hypothesis import BRIEFLY
from tests.support.network.loops import settle


@pytest.fixture
def one() -> Iterator[ByteThreads]:
    with closing(ByteThreads(1, "byte")) as threads:
        yield threads


class Work:
    """Blocks its threads until it is released. ``ended`` counts those that came to their end."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.ended = 0
        self._begun = threading.Semaphore(0)

    def __call__(self, buffer: memoryview) -> int:
        self._begun.release()
        assert self.release.wait(20)
        self.ended += 1
        return len(buffer)

    async def begun(self, count: int = 1) -> None:
        """So many more are at work."""
        for _ in range(count):
            assert await asyncio.to_thread(self._begun.acquire, timeout=20)


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.release.set()


async def test_work_gets_a_buffer_of_the_size_in_a_named_thread_and_its_result_comes_back(one: ByteThreads) -> None:
    assert [await one.run(size, len) for size in (0, 10, CHUNK_SIZE)] == [0, 10, CHUNK_SIZE]
    assert (await one.run(1, lambda _: threading.current_thread().name)).startswith("byte")


async def test_an_error_of_the_work_is_raised_and_the_buffer_is_free_again(one: ByteThreads) -> None:
    def fail(_: memoryview) -> None:
        raise LookupError("of the work")

    for _ in range(3):
        with pytest.raises(LookupError, match="of the work"):
            await one.run(1, fail)
    assert await one.run(5, len) == 5


@pytest.mark.parametrize("fails", [False, True])
async def test_cancelling_however_often_waits_for_the_thread_and_then_all_is_free(
    one: ByteThreads, work: Work, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller cleans up as soon as ``run`` has ended, and the thread would write where nothing is any more."""

    def call(buffer: memoryview) -> None:
        work(buffer)
        if fails:
            raise LookupError("nobody hears this")

    task = asyncio.create_task(one.run(1, call))
    await work.begun()
    next_one = asyncio.create_task(one.run(7, len))
    for _ in range(3):
        task.cancel()
        await settle()
        assert not task.done()
        assert not next_one.done()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended
    assert await next_one == 7
    assert caplog.records == []


async def test_closing_waits_for_the_threads(work: Work) -> None:
    threads = ByteThreads(1, "byte")
    task = asyncio.create_task(threads.run(1, work))
    await work.begun()
    closing_thread = threading.Thread(target=threads.close)
    closing_thread.start()
    work.release.set()
    await asyncio.to_thread(closing_thread.join)
    assert work.ended
    with suppress(asyncio.CancelledError):
        await task


# --- how many work at once follows what they achieve ---


class Pipe:
    """Everybody works in rounds: as many as may, all at once. A round takes as long as the pipe needs for so many chunks."""

    def __init__(self, count: int, least: int | None, seconds: Callable[[int], float]) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.threads = ByteThreads(count, "pipe", least=least, clock=lambda: self.now)

    async def round(self) -> int:
        """How many worked at once."""
        limit, work = self.threads.limit, Work()
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(self.threads.run(CHUNK_SIZE, work))
            await work.begun(limit)
            self.now += self.seconds(limit)
            work.release.set()
        return limit


def enough_for(knee: int) -> Callable[[int], float]:
    """So many threads fill the pipe; more share it."""
    return lambda count: max(1.0, count / knee)


async def test_threads_are_added_while_they_bring_more_and_parked_with_their_memory_when_they_do_not() -> None:
    pipe = Pipe(16, 2, enough_for(100))
    with closing(pipe.threads):
        counts = [await pipe.round() for _ in range(12)]
        assert (counts[0], counts[-1]) == (4, 16)
        assert counts == sorted(counts)
        assert pipe.threads.buffers == 16
        pipe.seconds = enough_for(4)
        counts = [await pipe.round() for _ in range(120)]
        assert max(counts[-40:]) <= 8
        assert pipe.threads.buffers <= 8
        pipe.seconds = enough_for(100)
        assert max([await pipe.round() for _ in range(120)]) == 16


@pytest.mark.parametrize(("count", "least", "fewest"), [(8, 3, 3), (5, None, 5)])
async def test_never_fewer_work_than_the_least_and_without_one_all_do(
    count: int, least: int | None, fewest: int
) -> None:
    pipe = Pipe(count, least, float)  # one alone would do
    with closing(pipe.threads):
        counts = [await pipe.round() for _ in range(60)]
    assert min(counts) == fewest


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("waiting", [False, True])
async def test_whatever_step_it_is_canceled_at_the_slot_and_the_buffer_are_free_again(
    steps: int, waiting: bool
) -> None:
    with closing(ByteThreads(1, "byte")) as threads:
        gate = threading.Event()
        first = asyncio.create_task(threads.run(1, lambda _: gate.wait(20))) if waiting else None
        await asyncio.sleep(0)
        task = asyncio.create_task(threads.run(1, len))
        for step in range(steps):
            await asyncio.sleep(0)
            if step == steps // 2:
                gate.set()  # so that the slot is handed over around the time of the cancellation
        task.cancel()
        gate.set()
        with suppress(asyncio.CancelledError):
            await task
        if first is not None:
            await first
        async with asyncio.timeout(60):
            assert await threads.run(7, len) == 7
        assert threads.buffers <= 1


async def test_a_slot_that_was_handed_over_to_somebody_who_is_canceled_before_he_hears_it_goes_to_the_next() -> None:
    with closing(ByteThreads(1, "byte")) as threads:
        gate = threading.Event()

        async def hand_over() -> None:
            await threads.run(1, lambda _: gate.wait(20))
            canceled.cancel()  # in the step in which the slot was given back

        first = asyncio.create_task(hand_over())
        await asyncio.sleep(0)
        canceled = asyncio.create_task(threads.run(1, len))
        following = asyncio.create_task(threads.run(3, len))
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(60):
            assert await following == 3
            await first
        assert canceled.cancelled()


async def test_who_has_received_lets_another_receive_and_keeps_its_buffer() -> None:
    """Of eight threads four may receive at first. The others write what they have."""
    with closing(ByteThreads(8, "byte", least=1)) as threads:
        for _ in range(2):  # the second time, after nobody worked
            disk = Work()

            def write(buffer: memoryview, disk: Work = disk) -> None:
                threads.received()
                threads.received()  # once is enough
                disk(buffer)

            async with asyncio.TaskGroup() as group:
                for _ in range(7):
                    group.create_task(threads.run(CHUNK_SIZE, write))
                await disk.begun(7)
                await threads.run(1, lambda _: threads.received())
                assert threads.buffers == 8, "while anybody works no memory is given back"
                disk.release.set()
            assert threads.buffers == threads.limit < 8


@pytest.mark.parametrize(("count", "least"), [(1, None), (8, 1)])
async def test_work_that_waits_for_a_thread_or_a_slot_is_canceled_at_once(
    work: Work, count: int, least: int | None
) -> None:
    with closing(ByteThreads(count, "byte", least=least)) as threads:
        busy = [asyncio.create_task(threads.run(1, work)) for _ in range(threads.limit)]
        await work.begun(len(busy))
        waiting = asyncio.create_task(threads.run(1, work))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        work.release.set()
        assert sum(await asyncio.gather(*busy)) == len(busy)
    assert work.ended == len(busy)  # closing has waited for whatever else was begun


def test_nobody_has_received_outside_of_work() -> None:
    with closing(ByteThreads(1, "byte")) as threads:
        threads.received()


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_buffers_that_are_out_at_once_are_pages_of_their_own() -> None:
    pool = BufferPool(2)
    with pool.take(10) as first, pool.take(CHUNK_SIZE) as second:
        assert abs(address_of(first) - address_of(second)) >= CHUNK_SIZE
        assert {address_of(buffer) % mmap.PAGESIZE for buffer in (first, second)} == {0}


def test_memory_is_used_again_before_more_is_made_also_after_its_user_failed() -> None:
    pool, used = BufferPool(3), 0
    with suppress(LookupError), pool.take(10) as buffer:
        used = address_of(buffer)
        raise LookupError
    with pool.take(10) as buffer:
        assert address_of(buffer) == used


def test_never_more_buffers_are_out_than_there_are() -> None:
    count, pool, lock, out, most = 3, BufferPool(3), Lock(), set[int](), list[int]()
    together = Barrier(count)

    def use(first: bool) -> None:
        with pool.take(1) as buffer:
            with lock:
                assert address_of(buffer) not in out
                out.add(address_of(buffer))
                most.append(len(out))
            if first:
                together.wait(60)  # all three at once
            with lock:
                out.remove(address_of(buffer))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, [True] * count + [False] * 50))
    assert max(most) == count


def test_memory_beyond_what_is_kept_goes_back_at_once_or_when_its_user_is_done() -> None:
    pool = BufferPool(3)
    with pool.take(1), pool.take(1):
        with pool.take(1):
            pass
        assert pool.made == 3
        pool.keep(1)
        assert pool.made == 2, "the free one is gone, those in use are not"
    assert pool.made == 1
    with pool.take(1), pool.take(1):
        assert pool.made == 2, "as many are given out as before"
    pool.keep(2)
    with pool.take(1), pool.take(1):
        pass
    assert pool.made == 2


MIB = 1024 * 1024


def test_a_burst_goes_at_once_what_follows_waits_for_the_rate_and_time_that_passes_pays_for_it() -> None:
    now = 0.0
    pace = Pacer(MIB, lambda: now)
    assert [pace(MIB) for _ in range(3)] == pytest.approx([0.0, 1.0, 2.0])
    now = 2.0
    assert pace(MIB) == pytest.approx(1.0)


def test_no_rate_is_no_pacer() -> None:
    assert pacer(None) is None


def slots(count: int) -> Slots:
    """As many as that, always."""
    return Slots(Pace(PaceRule(count, least=count), 0.0), lambda: 0.0)


def test_who_withdraws_after_the_call_passes_the_slot_on() -> None:
    made, first, second = slots(1), SlotRequest(1), SlotRequest(1)
    first.is_withdrawn = True  # in the moment between the call and the look
    assert not made.take(first)
    assert made.take(second)


class WithdrawnMeanwhile(SlotRequest):
    """Somebody withdraws it between two looks."""

    looks = 0

    @property
    def is_withdrawn(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @is_withdrawn.setter
    def is_withdrawn(self, value: bool) -> None:
        pass


def test_who_withdraws_after_the_look_loses_no_slot() -> None:
    made, first, second = slots(1), WithdrawnMeanwhile(1), SlotRequest(1)
    if made.take(first):
        made.give_back(first, Outcome.ARRIVED)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(made.take, second)
        try:
            assert following.result(60)
        finally:
            made.withdraw(second)


def test_who_is_told_to_stop_leaves_the_queue() -> None:
    made, first, second, stop = slots(1), SlotRequest(1), SlotRequest(1), threading.Event()
    assert made.take(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.take, second, stop)
        stop.set()
        assert not waiting.result(60)
    made.give_back(first, Outcome.ARRIVED)
    assert made.take(SlotRequest(1), stop)  # one that is free is not waited for


def test_a_slot_is_given_back_once() -> None:
    made, first, second = slots(1), SlotRequest(1), SlotRequest(1)
    assert made.take(first)
    made.give_back(first, Outcome.ARRIVED)
    assert made.take(second)
    made.give_back(first, Outcome.ARRIVED)  # its thread ends, which has given it back long ago
    assert second.begun is not None
    third = SlotRequest(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.take, third)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        made.give_back(second, Outcome.ARRIVED)
        assert waiting.result(20)


class Crowd:
    """Threads that want slots, one for each turn, and what is right to expect of them."""

    def __init__(self, count: int, pool: ThreadPoolExecutor) -> None:
        self.count = count
        self.slots = slots(count)
        self.pool = pool
        self.results: dict[SlotRequest, Future[bool]] = {}
        self.holding: list[SlotRequest] = []
        self.waiting: list[SlotRequest] = []

    def ask(self) -> None:
        turn = SlotRequest(1)
        asked = threading.Event()

        def take() -> bool:
            asked.set()
            return self.slots.take(turn)

        self.results[turn] = self.pool.submit(take)
        assert asked.wait(20)
        self._settle(turn)
        self.waiting.append(turn)
        self.expect()

    def _settle(self, turn: SlotRequest) -> None:
        """The thread has its slot, or stands in the queue."""
        while turn.begun is None and turn not in self.slots._waiting:
            threading.Event().wait(0.0005)

    def give_back(self, index: int) -> None:
        if self.holding:
            self.slots.give_back(self.holding.pop(index % len(self.holding)), Outcome.ARRIVED)
            self.expect()

    def withdraw(self, index: int) -> None:
        if self.waiting:
            turn = self.waiting.pop(index % len(self.waiting))
            self.slots.withdraw(turn)
            assert not self.results[turn].result(20)
            self.expect()

    def expect(self) -> None:
        while self.waiting and len(self.holding) < self.count:
            turn = self.waiting.pop(0)
            assert self.results[turn].result(20)
            self.holding.append(turn)
        assert all(turn.begun is not None for turn in self.holding)
        assert not any(turn.begun is not None for turn in self.waiting)


@BRIEFLY
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["ask", "give_back", "withdraw"]), st.integers(0, 9))))
def test_whatever_happens_the_longest_waiting_hold_the_slots(count: int, steps: list[tuple[str, int]]) -> None:
    with ThreadPoolExecutor(max(1, len(steps))) as pool, ExitStack() as stack:
        crowd = Crowd(count, pool)

        def let_go() -> None:
            for turn in [*crowd.waiting, *crowd.holding]:
                crowd.slots.withdraw(turn)

        stack.callback(let_go)
        for name, index in steps:
            crowd.ask() if name == "ask" else getattr(crowd, name)(index)
