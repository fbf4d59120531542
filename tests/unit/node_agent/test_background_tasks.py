import asyncio
import threading

import pytest

from bdn.disk.threads import in_thread, to_the_end
from node_agent.background_tasks import BackgroundTasks


async def test_a_canceled_caller_waits_for_its_thread() -> None:
    began, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(60)
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


async def test_leaving_cancels_the_tasks_and_waits_for_them() -> None:
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


@pytest.mark.parametrize("is_in_the_body", [True, False])
async def test_an_error_of_the_body_or_of_a_task_ends_the_others_and_is_raised_as_it_is(is_in_the_body: bool) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def program() -> None:
        others = asyncio.sleep(3600)
        async with BackgroundTasks() as background:
            background.start(others if is_in_the_body else fail(), "work")
            await (fail() if is_in_the_body else others)

    with pytest.raises(ValueError, match="a bug"):
        await program()
