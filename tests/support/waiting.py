"""Waiting for what others do."""

import asyncio
from collections.abc import Callable

LONGEST_SECONDS = 60.0  # what a request may wait for; the work of a dead process is taken over after 15 s


async def until(condition: Callable[[], object], what: str = "", *, seconds: float = LONGEST_SECONDS) -> None:
    """Come back once the condition holds. Looks, rather than waits for a length of time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is looked at are logs, files and rows of others
            await asyncio.sleep(0.01)
    assert condition(), what
