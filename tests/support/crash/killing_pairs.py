"""Several tries of one kind at a time."""

import asyncio
from collections.abc import Awaitable, Callable


async def two_at_a_time(one: Callable[[int], Awaitable[None]], total: int) -> None:
    """``one`` with each number below ``total``: starting a process leaves time for another."""
    numbers = iter(range(total))

    async def work() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(work())
