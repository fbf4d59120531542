"""Asking an upstream again after failures that may pass: on the event loop, so that nobody's thread waits for a backoff."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bdn.core.errors import UpstreamError
from bdn.core.retry import RetryPolicy

_Answer = TypeVar("_Answer")
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Patience:
    """One policy for listings, locations and ranges alike; ``Retry-After`` is honoured here and nowhere else."""

    pause: Pause = asyncio.sleep
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    draw: Callable[[], float] = random.random

    async def run(self, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer, or the last failure. Can be canceled while it waits."""
        failures = 0
        while True:
            try:
                return await ask()
            except UpstreamError as error:
                failures += 1
                delay = self.policy.delay(failures, error, self.draw())
                if delay is None:
                    raise
            await self.pause(delay)
