"""Waiting for something to change, without asking the database all the time.

Changes made in this process wake waiters at once; changes made by another process are seen when the caller looks again,
because every wait has a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Seen = TypeVar("_Seen")


def agent_topic(cluster: str, node: str) -> str:
    """What an agent's open heartbeat waits for."""
    return f"agent {cluster}/{node}"


class Watch:
    """Topics are names such as a mirror's id. One event loop."""

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.stopping = False

    def stop(self) -> None:
        """Wake everybody, now and from now on: the service ends, and open requests shall be answered with what is known."""
        self.stopping = True
        for topic in tuple(self._waiters):
            self.notify(topic)

    def notify(self, topic: str) -> None:
        """Wake everybody who waits for this topic now."""
        for event in self._waiters.pop(topic, ()):
            event.set()

    async def changed(self, topic: str, timeout_seconds: float) -> bool:
        """Wait for a notification; False when the time ran out. What changed before the call is not noticed: look first."""
        event = asyncio.Event()
        self._waiters[topic].add(event)
        try:
            async with asyncio.timeout(timeout_seconds):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            waiting = self._waiters.get(topic)
            if waiting is not None:
                waiting.discard(event)
                if not waiting:
                    del self._waiters[topic]
        return True

    async def look_until(
        self,
        topic: str,
        look: Callable[[], Awaitable[_Seen]],
        is_over: Callable[[_Seen], bool],
        wait_seconds: float,
        again_seconds: float,
    ) -> _Seen:
        """What ``look`` saw when it was over, or else when the time was, or the service ended.

        It looks at once, whenever something changes here, and after ``again_seconds``, because of what others change.
        """
        deadline = time.monotonic() + wait_seconds
        seen = await look()
        while not is_over(seen) and not self.stopping and (left := deadline - time.monotonic()) > 0:
            await self.changed(topic, min(left, again_seconds))
            seen = await look()
        return seen
