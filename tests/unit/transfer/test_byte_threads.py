"""Work in a bounded number of threads, and what cancelling it leaves behind: nothing that still runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.transfer.byte_threads import ByteThreads


@pytest.fixture
def one() -> Iterator[ByteThreads]:
    with closing(ByteThreads(1, "byte")) as threads:
        yield threads


class Work:
    """Blocks its thread until it is released. ``ended`` tells whether the thread came to its end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self.ended = False

    def __call__(self, buffer: memoryview) -> int:
        self.begun.set()
        assert self.release.wait(20)
        self.ended = True
        return len(buffer)


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.release.set()


async def begun(work: Work) -> None:
    assert await asyncio.to_thread(work.begun.wait, 20)


async def turns(count: int = 20) -> None:
    """Let everything run that can run on the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_work_gets_a_buffer_of_the_size_and_its_result_comes_back(one: ByteThreads) -> None:
    assert [await one.run(size, len) for size in (0, 10, CHUNK_SIZE)] == [0, 10, CHUNK_SIZE]


async def test_work_runs_in_a_thread_with_the_pools_name(one: ByteThreads) -> None:
    name = await one.run(1, lambda _: threading.current_thread().name)
    assert name.startswith("byte")


async def test_an_error_of_the_work_is_raised_and_the_buffer_is_free_again(one: ByteThreads) -> None:
    def fail(_: memoryview) -> None:
        raise LookupError("of the work")

    for _ in range(3):
        with pytest.raises(LookupError, match="of the work"):
            await one.run(1, fail)
    assert await one.run(5, len) == 5


async def test_as_many_run_at_once_as_there_are_threads_and_no_more() -> None:
    count = 3
    together = threading.Barrier(count)
    lock = threading.Lock()
    running, most = 0, 0

    def work(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number < count:
            together.wait(20)
        with lock:
            running -= 1

    def numbered(number: int) -> asyncio.Task[None]:
        return group.create_task(threads.run(1, lambda _: work(number)))

    with closing(ByteThreads(count, "byte")) as threads:
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                numbered(number)
    assert most == count


async def test_those_who_wait_are_served_in_the_order_in_which_they_came(one: ByteThreads) -> None:
    order: list[int] = []

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(one.run(1, lambda _, number=number: order.append(number)))  # type: ignore[misc]
    assert order == list(range(10))


async def test_cancelling_waits_for_the_thread(one: ByteThreads, work: Work) -> None:
    task = asyncio.create_task(one.run(1, work))
    await begun(work)
    task.cancel()
    await turns()
    assert not task.done()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended


async def test_cancelling_again_and_again_still_waits_for_the_thread(one: ByteThreads, work: Work) -> None:
    """The caller cleans up as soon as ``run`` has ended, and the thread would write where nothing is any more."""
    task = asyncio.create_task(one.run(1, work))
    await begun(work)
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended


async def test_after_a_cancellation_the_buffer_and_the_thread_are_free(one: ByteThreads, work: Work) -> None:
    task = asyncio.create_task(one.run(1, work))
    await begun(work)
    task.cancel()
    next_one = asyncio.create_task(one.run(7, len))
    await turns()
    assert not next_one.done()
    work.release.set()
    assert await next_one == 7
    assert task.cancelled()


async def test_an_error_of_cancelled_work_is_lost_without_a_complaint(
    one: ByteThreads, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(buffer: memoryview) -> None:
        work(buffer)
        raise LookupError("nobody hears this")

    task = asyncio.create_task(one.run(1, fail))
    await begun(work)
    task.cancel()
    await turns()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await one.run(5, len) == 5
    assert caplog.records == []


async def test_work_that_never_began_is_cancelled_at_once(one: ByteThreads, work: Work) -> None:
    busy = asyncio.create_task(one.run(1, work))
    await begun(work)
    called = False

    def call(_: memoryview) -> None:
        nonlocal called
        called = True

    waiting = asyncio.create_task(one.run(1, call))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    work.release.set()
    assert await busy == 1
    assert not called


async def test_closing_waits_for_the_threads(work: Work) -> None:
    threads = ByteThreads(1, "byte")
    task = asyncio.create_task(threads.run(1, work))
    await begun(work)
    closing_thread = threading.Thread(target=threads.close)
    closing_thread.start()
    work.release.set()
    await asyncio.to_thread(closing_thread.join)
    assert work.ended
    with suppress(asyncio.CancelledError):
        await task
