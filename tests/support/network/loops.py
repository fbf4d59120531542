"""Turns of an event loop."""

import asyncio


async def settle() -> None:
    """Every task goes as far as it can without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)
