"""Whoever waits for work of a service goes on asking while that does not answer: the work goes on without being watched."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from bdn.core.errors import BdnError
from bdn.core.pace.retry import RetryPolicy

PATIENCE_SECONDS: Final = 600.0  # a mirror that is restarted, or moved to another machine, is back by then
_POLICY: Final = RetryPolicy(attempts=sys.maxsize, first_seconds=0.5, longest_seconds=10.0)
_Answer = TypeVar("_Answer")


def _ignore(_: BdnError | None) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Persistence:
    """Asks again for ``seconds`` after the first failure in a row.

    ``told`` hears of that failure, and None when there is an answer again.
    """

    seconds: float = PATIENCE_SECONDS
    told: Callable[[BdnError | None], None] = _ignore
    policy: RetryPolicy = _POLICY

    async def ask(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The answer; ``question`` must be one that changes nothing.

        Raises:
            BdnError: of ``question``: what is not transient at once, the rest when the time is over.
        """
        now = asyncio.get_running_loop().time
        failures, until = 0, 0.0
        while True:
            try:
                answer = await question()
            except BdnError as error:
                if not failures:
                    until = now() + self.seconds
                failures += 1
                delay = self.policy.delay(failures, error, random.random())  # noqa: S311 - not a secret
                if delay is None or now() + delay > until:
                    raise
                if failures == 1:
                    self.told(error)
                await asyncio.sleep(delay)
                continue
            if failures:
                self.told(None)
            return answer


PERSISTENT: Final = Persistence()
