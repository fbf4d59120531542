"""Pushes the checkpoints of a job volume during its run, and drains them after the run."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from datetime import datetime
from typing import Any

from bdn.core.errors import BdnError, InternalError
from bdn.wire.mirror_schema import Mirror
from bdn.wire.shapes import body_of
from node_agent.job.syncing import AGAIN_SECONDS, LOOK_SECONDS, Found, Syncer

logger = logging.getLogger(__name__)

Pushed = Callable[[Found, Mirror], object]


class VolumeSync:
    """Runs once, in one event loop. ``open_syncer`` opens a syncer, which calls back after each push.

    After a reboot no process writes any more, and only checkpoints that had settled before are pushed.
    """

    def __init__(
        self,
        job: str,
        open_syncer: Callable[[Pushed], AbstractAsyncContextManager[Syncer]],
        *,
        is_after_restart: bool = False,
    ) -> None:
        self.job = job
        self._is_after_restart = is_after_restart
        self.left: list[str] = []  # incomplete at the end
        self.kept: str | None = None  # grant to read the newest checkpoint that this process pushed
        self._open_syncer = open_syncer
        self._syncer: Syncer | None = None
        self._newest: datetime | None = None
        self._error: BdnError | None = None
        self._unsynced_bytes: int | None = None
        self._is_over = asyncio.Event()
        self._is_given_up = asyncio.Event()
        self._turn_is_over = asyncio.Event()  # ends the open syncer
        if is_after_restart:
            self.drain()

    def drain(self) -> None:
        """The run has ended: push the remaining checkpoints, then stop."""
        self._is_over.set()
        self._turn_is_over.set()

    def begin_anew(self) -> None:
        """Restart with a new syncer, for which ``open_syncer`` may use a renewed grant."""
        self._turn_is_over.set()

    def give_up(self) -> None:
        if not self._is_given_up.is_set():
            facts = {"job": self.job, "bytes": self.unsynced_bytes, "error": str(self._error)}
            logger.warning("dropping checkpoints that could not be pushed for too long", extra=facts)
        self._is_given_up.set()
        self.drain()

    @property
    def unsynced_bytes(self) -> int | None:
        """Bytes of uncommitted checkpoints, from the last scan; None before the first scan."""
        if self._syncer is not None and self._syncer.unsynced is not None:
            self._unsynced_bytes = self._syncer.unsynced_bytes
        return self._unsynced_bytes

    def figures(self) -> dict[str, Any]:
        """Fields of ``CheckpointDirectory``."""
        syncer = self._syncer
        error = self._error or (syncer and syncer.error)
        return {
            "job": self.job,
            "sync_status": "COMPLETED" if syncer is not None and syncer.unsynced == [] else "SYNCING",
            "unsynced_bytes": self.unsynced_bytes or 0,
            "pushed": syncer.journal.names if syncer else [],
            "left": self.left,
            "error": body_of(error) if error else None,
        }

    async def run(self) -> None:
        """Returns once the run has ended and all complete checkpoints are pushed or given up."""
        while not self._is_over.is_set():
            self._turn_is_over.clear()
            await self._again(self._while_it_runs)
        while not self._is_given_up.is_set() and not await self._again(self._to_the_end):
            pass

    async def _again(self, work: Callable[[Syncer], Any]) -> bool:
        """Returns False after a failure and a pause: the disk or the mirror failed, and a retry may succeed."""
        try:
            async with self._open_syncer(self._pushed) as self._syncer:
                await work(self._syncer)
        except Exception as error:
            if isinstance(error, BdnError):
                self._error = error
                logger.warning("cannot push checkpoints of %s; retrying in a minute: %s", self.job, error)
            else:  # a bug triggered by one job's files must not stop other jobs
                self._error = InternalError(type(error).__name__)
                logger.exception("cannot push checkpoints of %s; retrying in a minute", self.job)
            await _pause(self._is_given_up, AGAIN_SECONDS)
            return False
        self._error = None
        return True

    async def _while_it_runs(self, syncer: Syncer) -> None:
        await syncer.run(self._turn_is_over)

    async def _to_the_end(self, syncer: Syncer) -> None:
        """Retry incomplete checkpoints for as long as settling takes: a process may still be writing them."""
        waited = 0.0
        while True:
            self.left = await syncer.run_once(is_after_restart=self._is_after_restart)
            is_last = self._is_after_restart or waited >= syncer.settle_seconds or self._is_given_up.is_set()
            if not self.left or is_last:
                return
            await _pause(self._is_given_up, LOOK_SECONDS)
            waited += LOOK_SECONDS

    def _pushed(self, found: Found, mirror: Mirror) -> None:
        if self._newest is None or found.newest >= self._newest:
            self._newest, self.kept = found.newest, mirror.grant


async def _pause(ended: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ended.wait()
