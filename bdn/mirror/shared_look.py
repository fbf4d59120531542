"""One look for everybody who wants to know the same at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Seen = TypeVar("_Seen")
_Key = TypeVar("_Key")


class SharedLook(Generic[_Seen]):
    """What ``look`` returned, at most ``seconds`` ago. One event loop.

    What another process changes is seen after that time; whoever changes something here says ``forget``.
    """

    def __init__(
        self, look: Callable[[], Awaitable[_Seen]], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._seconds = seconds
        self._clock = clock
        self._kept: tuple[float, _Seen] | None = None
        self._failed: tuple[float, Exception] | None = None
        self._forgotten = 0
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Something changed: who asks from now on sees it, also when somebody is looking at this moment."""
        self._forgotten += 1
        self._kept = None

    async def get(self, *, anew: bool = False) -> _Seen:
        """One looks, the others wait for it, and for what ``look`` raises.

        ``anew`` is for who has heard that something changed: a look that began before this call is not good enough. Of many
        who heard it at once, the first one looks, and the second for all others. However long that takes: what was seen
        since somebody asked is not too old for him.
        """
        asked = self._clock()
        async with self._lock:
            oldest = asked if anew else min(asked, self._clock() - self._seconds)
            if self._kept is not None and self._kept[0] >= oldest:
                return self._kept[1]
            if self._failed is not None and self._failed[0] >= asked:
                raise self._failed[1].with_traceback(None)
            began, forgotten = self._clock(), self._forgotten
            self._failed = None
            try:
                seen = await self._look()
            except Exception as error:
                self._failed = (began, error)
                raise
            if forgotten == self._forgotten:
                self._kept = (began, seen)
            return seen


@dataclass
class _Wanted(Generic[_Seen]):
    look: SharedLook[_Seen]
    askers: int = 0


@dataclass(frozen=True)
class SharedLooks(Generic[_Key, _Seen]):
    """One shared look for each question, for as long as somebody asks it. ``seconds`` as of ``SharedLook``."""

    seconds: float
    _wanted: dict[_Key, _Wanted[_Seen]] = field(default_factory=dict)

    @contextmanager
    def of(self, key: _Key, look: Callable[[], Awaitable[_Seen]]) -> Iterator[SharedLook[_Seen]]:
        """The look that all who ask the same share, until the block ends. Equal keys have looks that do the same."""
        wanted = self._wanted.setdefault(key, _Wanted(SharedLook(look, self.seconds)))
        wanted.askers += 1
        try:
            yield wanted.look
        finally:
            wanted.askers -= 1
            if not wanted.askers:
                del self._wanted[key]

    def __len__(self) -> int:
        """How many questions are being asked."""
        return len(self._wanted)
