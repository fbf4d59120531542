"""How many byte threads work at once follows what they achieve, and no cancellation at any step keeps a slot or a buffer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.transfer.byte_threads import ByteThreads


class Pipe:
    """Everybody works in rounds: as many as may, all at once. A round takes as long as the pipe needs for so many chunks."""

    def __init__(self, count: int, least: int | None, seconds: Callable[[int], float]) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.threads = ByteThreads(count, "pipe", least=least, clock=lambda: self.now)

    async def round(self) -> int:
        """How many worked at once."""
        limit, gate = self.threads.limit, threading.Event()
        begun = threading.Semaphore(0)

        def work(_: memoryview) -> None:
            begun.release()
            assert gate.wait(20)

        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(self.threads.run(CHUNK_SIZE, work))
            for _ in range(limit):
                assert await asyncio.to_thread(begun.acquire, timeout=20)
            self.now += self.seconds(limit)
            gate.set()
        return limit


def enough_for(knee: int) -> Callable[[int], float]:
    """So many threads fill the pipe; more share it."""
    return lambda count: max(1.0, count / knee)


async def test_threads_are_added_while_they_bring_more() -> None:
    pipe = Pipe(16, 2, enough_for(100))
    with closing(pipe.threads):
        counts = [await pipe.round() for _ in range(12)]
    assert counts[0] == 4
    assert counts[-1] == 16
    assert counts == sorted(counts)


async def test_threads_that_bring_nothing_are_parked_and_their_memory_goes_back() -> None:
    pipe = Pipe(16, 2, enough_for(100))
    with closing(pipe.threads):
        for _ in range(12):
            await pipe.round()
        assert pipe.threads.buffers == 16
        pipe.seconds = enough_for(4)
        counts = [await pipe.round() for _ in range(120)]
        assert max(counts[-40:]) <= 8
        assert pipe.threads.buffers <= 8
        pipe.seconds = enough_for(100)
        assert max([await pipe.round() for _ in range(120)]) == 16


async def test_never_fewer_work_than_the_least() -> None:
    pipe = Pipe(8, 3, float)  # one alone would do
    with closing(pipe.threads):
        counts = [await pipe.round() for _ in range(60)]
    assert min(counts) == 3


async def test_without_a_least_all_of_them_work_always() -> None:
    pipe = Pipe(5, None, float)
    with closing(pipe.threads):
        assert {await pipe.round() for _ in range(20)} == {5}


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
        async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
            assert await following == 3
            await first
        assert canceled.cancelled()


class Disk:
    """``write`` is work that has received its bytes, twice over, and then takes until ``gate`` opens."""

    def __init__(self, threads: ByteThreads) -> None:
        self.threads = threads
        self.gate = threading.Event()
        self._begun = threading.Semaphore(0)

    def write(self, _: memoryview) -> None:
        self.threads.received()
        self.threads.received()  # once is enough
        self._begun.release()
        assert self.gate.wait(20)

    async def begun(self, count: int) -> None:
        """So many more are writing."""
        for _ in range(count):
            assert await asyncio.to_thread(self._begun.acquire, timeout=20)


async def test_who_has_received_lets_another_receive_and_keeps_its_buffer() -> None:
    """Of four threads one may receive. The others write what they have."""
    with closing(ByteThreads(4, "byte", least=1)) as threads:
        threads._slots._pace.limit = 1
        disk = Disk(threads)
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(threads.run(CHUNK_SIZE, disk.write))
            await disk.begun(4)
            assert threads.buffers == 4
            disk.gate.set()
        assert threads.buffers == 1


async def test_while_anybody_works_no_memory_is_given_back_and_taken_again() -> None:
    with closing(ByteThreads(2, "byte", least=1)) as threads:
        threads._slots._pace.limit = 1
        for _ in range(2):  # the second time, after nobody worked
            disk = Disk(threads)
            async with asyncio.TaskGroup() as group:
                group.create_task(threads.run(1, disk.write))
                await disk.begun(1)
                await threads.run(1, lambda _: threads.received())
                assert threads.buffers == 2
                disk.gate.set()
            assert threads.buffers == 1


async def test_work_that_waits_for_a_slot_is_canceled_at_once() -> None:
    with closing(ByteThreads(2, "byte", least=1)) as threads:
        threads._slots._pace.limit = 1
        gate, called = threading.Event(), threading.Event()
        busy = asyncio.create_task(threads.run(1, lambda _: gate.wait(20)))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(threads.run(1, lambda _: called.set()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert await busy
        assert not called.is_set()


def test_nobody_has_received_outside_of_work() -> None:
    with closing(ByteThreads(1, "byte")) as threads:
        threads.received()
