"""``FairLimit``: places on the event loop, round robin over organisations."""

import asyncio
from contextlib import suppress

from bdn.transfer.fair_limit import FairLimit


async def worked(limit: FairLimit, owner: str, order: list[str]) -> None:
    async with limit.place(owner):
        order.append(owner)
        await asyncio.sleep(0)


async def test_places__go_round_robin() -> None:
    limit, order = FairLimit(1), list[str]()
    async with asyncio.TaskGroup() as group:
        for owner in "aaaabcb":
            group.create_task(worked(limit, owner, order))
    assert order == [*"aabcaba"]


async def test_place_of_a_canceled_task__is_free_for_the_next() -> None:
    limit, order = FairLimit(1), list[str]()
    async with limit.place("a"):
        waiting = asyncio.create_task(worked(limit, "b", order))
        granted = asyncio.create_task(worked(limit, "c", order))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    granted.cancel()  # when it has its place already, and has not run since
    with suppress(asyncio.CancelledError):
        await granted
    await worked(limit, "d", order)
    assert order == ["d"]
