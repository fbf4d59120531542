"""How far a stage's files have come into the page cache."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from bdn.wire.stage_schema import Warm, WarmState


@dataclass
class Warming:
    """State in memory; the task that works on it ends it. After a restart it begins anew."""

    bytes_total: int
    state: WarmState = "WARMING"
    bytes_read: int = 0
    reason: str | None = None
    task: asyncio.Task[None] | None = None
    _began: float = field(default_factory=time.monotonic)
    _seconds: float | None = None

    @property
    def is_going_on(self) -> bool:
        """Whether files are being read, or will be."""
        return self.state == "WARMING"

    def end(self, state: WarmState, reason: str | None = None) -> None:
        """The first end counts."""
        if self.is_going_on:
            self.state, self.reason, self._seconds = state, reason, time.monotonic() - self._began

    async def stop(self) -> None:
        """Cancel the work and wait until no file of the view is open any more."""
        if self.task and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
        self.end("STOPPED", "the stage was released")

    def document(self) -> Warm:
        """What the wire shows."""
        seconds = time.monotonic() - self._began if self._seconds is None else self._seconds
        return Warm(
            state=self.state,
            bytes=self.bytes_read,
            bytes_total=self.bytes_total,
            seconds=seconds,
            reason=self.reason,
        )
