"""One stage while the agent runs: its record, how far it is, and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from bdn.wire import stage_schema
from bdn.wire.moments import moment
from bdn.wire.stage_schema import TERMINAL, StageMount
from node_agent.fetch.fill_context import RetryBudget
from node_agent.stage.progress import Rate, StageProgress, bytes_done
from node_agent.stage.record import MountRecord, StageRecord
from node_agent.stage.view.destination import Earlier
from node_agent.stage.warming import Warming


class Stage:
    """State in memory. Transitions are asked for one at a time under ``lock``; records are written under ``saving``.

    A READY stage that lacks files stays READY while these are brought again (``is_mending``): whoever asks for it waits.
    One whose release failed half-way stays READY, too, but may show nothing (``is_ending``): who asks for it begins it anew.
    """

    def __init__(self, record: StageRecord) -> None:
        self.record = record
        self.progress: StageProgress | None = None
        self.budget: RetryBudget | None = None
        self.rate = Rate()
        self.earlier: Earlier | None = None
        self.warming: Warming | None = None
        self.deadline: float | None = None  # in seconds of the agent's clock that nobody sets
        self.is_mending = False
        self.is_ending = False  # it is being taken down, or was: from then on it takes no lease, until it begins anew
        self.mend_at: float | None = None  # by the same clock; None while nothing is known to be lacking
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stop = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def is_working(self) -> bool:
        """Whether a task works on it."""
        return self.task is not None and not self.task.done()

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.record.state in TERMINAL and not self.is_mending

    def begin(self, progress: StageProgress, budget: RetryBudget) -> None:
        """The bytes to come are known, and what may be spent on sources that fail."""
        self.progress = progress
        self.budget = budget
        self.rate = Rate()

    def notify(self) -> None:
        """Wake who waits for a change of state."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the state is terminal; False when the time ran out."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.is_terminal:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def document(self, path_of: Callable[[MountRecord], str]) -> stage_schema.Stage:
        """The stage as the wire shows it."""
        record = self.record
        mounts = [self._mount(index, mount, path_of(mount)) for index, mount in enumerate(record.mounts)]
        rate = record.bytes_per_second if self.is_terminal else self.rate.per_second(time.monotonic())
        left = sum(mount.bytes_total - mount.bytes_done for mount in mounts if mount.bytes_total is not None)
        is_known = not self.is_terminal and all(mount.bytes_total is not None for mount in mounts)
        return stage_schema.Stage(
            id=record.id,
            job_id=record.job_id,
            state="STAGING" if self.is_mending else record.state,
            created_at=moment(record.created_at),
            ready_at=moment(record.ready_at) if record.ready_at is not None else None,
            expires_at=moment(record.expires_at) if record.expires_at is not None else None,
            mounts=mounts,
            bytes_per_second=rate,
            eta_seconds=left / rate if rate and is_known else None,
            transfer=self.budget.document() if self.budget and not self.is_terminal else record.transfer,
            warm=self.warming.document() if self.warming else None,
            error=record.error,
        )

    def _mount(self, index: int, mount: MountRecord, path: str) -> StageMount:
        came = self.progress.bytes_from(index) if self.progress else mount.bytes_from
        return StageMount(
            mount_location=mount.mount_location,
            path=path,
            manifest=mount.manifest,
            source=mount.source,
            view=mount.view,
            view_reason=mount.view_reason,
            exposure=mount.exposure,
            files_total=mount.files_total,
            bytes_total=mount.bytes_total,
            bytes_done=bytes_done(came),
            bytes_from=came,
        )
