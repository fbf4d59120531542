import asyncio
from contextlib import AsyncExitStack

from hypothesis import given
from hypothesis import strategies as st

from node_agent.fetch.bandwidth import OrderedLimit
from tests.support.network.loops import settle


async def test_the_lowest_position_is_next_whoever_came_first() -> None:
    places, served, gate = OrderedLimit(1), list[int](), asyncio.Event()

    async def work(position: int) -> None:
        async with places.place((position,)):
            await gate.wait()
            served.append(position)

    async with asyncio.TaskGroup() as group:
        for position in (5, 9, 1, 7):
            group.create_task(work(position))
            await settle()
        gate.set()
    assert served == [5, 1, 7, 9]


async def test_the_last_ones_are_those_who_have_their_places() -> None:
    places, gate = OrderedLimit(2), asyncio.Event()

    async def work(position: int) -> None:
        async with places.place((position,)):
            await gate.wait()

    async with asyncio.TaskGroup() as group:
        seen = [places.is_last]
        for position in range(3):
            group.create_task(work(position))
            await settle()
            seen.append(places.is_last)
        gate.set()
    assert seen == [True, True, True, False]


async def test_one_who_is_canceled_when_it_is_its_turn_passes_it_on() -> None:
    places = OrderedLimit(1)
    first = places.place((0,))
    await first.__aenter__()

    async def wait(position: int) -> None:
        async with places.place((position,)):
            pass

    second, third = asyncio.create_task(wait(1)), asyncio.create_task(wait(2))
    await settle()
    await first.__aexit__(None, None, None)  # the second one's turn, of which it has not heard
    second.cancel()
    async with asyncio.timeout(60):
        await third
    assert second.cancelled()


@given(limit=st.integers(1, 4), canceled=st.lists(st.booleans(), min_size=1, max_size=12))
def test_never_more_than_the_limit_and_nobody_is_forgotten(limit: int, canceled: list[bool]) -> None:
    async def run() -> None:
        places, at_once, most, done = OrderedLimit(limit), 0, 0, 0

        async def work(position: int) -> None:
            nonlocal at_once, most, done
            async with places.place((position,)):
                at_once += 1
                most = max(most, at_once)
                try:
                    await asyncio.sleep(0)
                    done += 1
                finally:
                    at_once -= 1

        tasks = [asyncio.create_task(work(len(canceled) - number)) for number in range(len(canceled))]
        await asyncio.sleep(0)
        for task, is_canceled in zip(tasks, canceled, strict=True):
            if is_canceled:
                task.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= limit
        assert done == sum(not task.cancelled() for task in tasks)
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            for _ in range(limit):
                await stack.enter_async_context(places.place((0,)))

    asyncio.run(run())
