import asyncio
import threading

import pytest

from node_agent.background_tasks import BackgroundTasks, in_thread, to_the_end


async def test_a_canceled_caller_waits_for_its_thread() -> None:
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(10)
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_two_cancellations_do_not_stop_work_that_goes_to_the_end() -> None:
    gate, steps = asyncio.Event(), []

    async def work() -> None:
        steps.append("begun")
        await gate.wait()
        steps.append("ended")

    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["begun", "ended"]


async def test_an_error_of_work_that_goes_to_the_end_reaches_its_caller() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await to_the_end(work())


async def test_leaving_a_crew_cancels_its_tasks_and_waits_for_them() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async with BackgroundTasks() as background:
        background.start(work(), "work")
        await asyncio.sleep(0)

    assert ended == [True]


async def test_an_error_of_the_body_leaves_a_crew_as_it_is() -> None:
    async def program() -> None:
        async with BackgroundTasks() as background:
            background.start(asyncio.sleep(3600), "work")
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        await program()


async def test_a_task_that_raises_is_a_bug_and_ends_the_body() -> None:
    async def work() -> None:
        raise ValueError("a bug")

    async def program() -> None:
        async with BackgroundTasks() as background:
            background.start(work(), "work")
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="a bug"):
        await program()
