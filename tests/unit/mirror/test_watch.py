"""Waiting for something to change."""

import asyncio

from bdn.mirror.waiting import Watch


async def test_everybody_who_waits_for_the_topic_is_woken_and_nobody_else() -> None:
    watch = Watch()
    waiting = [asyncio.create_task(watch.changed("a", 60)) for _ in range(2)]
    other = asyncio.create_task(watch.changed("b", 60))
    await asyncio.sleep(0)
    watch.notify("a")
    assert await asyncio.gather(*waiting) == [True, True]
    assert not other.done()
    other.cancel()


async def test_who_is_not_woken_comes_back_when_the_time_is_over() -> None:
    watch = Watch()
    watch.notify("a")  # before: not noticed
    assert await watch.changed("a", 0) is False


async def test_nothing_is_kept_of_those_who_have_left() -> None:
    watch = Watch()
    waiting = asyncio.create_task(watch.changed("a", 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await watch.changed("a", 0)
    assert not watch._waiters
