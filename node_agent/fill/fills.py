"""At most one fill per file on this node, shared by all waiting callers; one fill for files fetched together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from bdn.core.chunk import Digest
from bdn.core.errors import DiskFailedError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.disk.threads import to_the_end
from bdn.transfer.under_way import UnderWay
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import BackgroundTasks

Report = Callable[[Tier, int], None]  # the tier of bytes that are here now, and how many
FileReport = Callable[[Digest, Tier, int], None]  # likewise, with the file


Start = Callable[["Fill"], Coroutine[object, object, None]]


@dataclass(eq=False)
class Fill:
    """A fill in progress. It has no owner: its leader may leave, and it continues while any caller waits.

    ``under_way`` counts bytes received and not reported yet.
    """

    leader: FileReport
    task: asyncio.Task[None] = field(init=False)
    files: dict[Digest, FileFill] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    under_way: UnderWay = field(default_factory=UnderWay)
    error: Exception | None = None

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        """Notify all listeners. For all but the leader the bytes count as found on this node."""
        file_fill = self.files[file]
        file_fill.done += size
        for listener in file_fill.listeners:
            listener(file, tier if listener is self.leader else "node", size)

    @property
    def traffic(self) -> TrafficClass:
        """The most urgent class among the waiting callers."""
        waiting = (traffic for file_fill in self.files.values() for traffic in file_fill.listeners.values())
        return min(waiting, default=TrafficClass.STAGE)

    @property
    def is_over(self) -> bool:
        return self.task.done()

    @property
    def has_succeeded(self) -> bool:
        return self.is_over and self.error is None and not self.task.cancelled()

    @property
    def is_abandoned(self) -> bool:
        """Whether it is running and no caller waits for any of its files."""
        return not self.is_over and not any(file_fill.listeners for file_fill in self.files.values())


@dataclass(eq=False)
class FileFill:
    fill: Fill
    listeners: dict[FileReport, TrafficClass] = field(default_factory=dict)
    done: int = 0


class Fills:
    """Fills in progress by file. ``background`` outlives the stages, so a fill survives the stage that began it."""

    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._files: dict[Digest, FileFill] = {}

    async def join(
        self,
        files: Collection[Digest],
        start: Start,
        report: FileReport,
        restart: Callable[[Digest], None],
        traffic: TrafficClass = TrafficClass.STAGE,
    ) -> None:
        """Wait until these files are whole; starts one fill for the files that have none.

        ``start`` makes the coroutine of a fill. ``report``, a callable unique to this caller, gets progress.
        ``restart`` is called when the progress of a file is void, because another fill begins. On cancellation the
        caller leaves its fills; the last caller to leave a fill ends it, and waits until it has ended.

        Raises ``BdnError``: the caller's own fill failed, or the disk did in any fill.
        """
        waiting = list(dict.fromkeys(files))
        joined: dict[Digest, FileFill] = {}
        try:
            while waiting:
                self._begin([file for file in waiting if file not in self._files], start, report)
                for file in waiting:
                    self._join(file, joined, report, traffic)
                tasks = {file_fill.fill.task for file_fill in joined.values()}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                waiting = self._still_waiting(waiting, joined, report, restart)
        finally:
            await _leave(joined.values(), report)

    def under_way(self, file: Digest) -> UnderWay | None:
        """Bytes under way in this file's fill, if there is one."""
        file_fill = self._files.get(file)
        return file_fill.fill.under_way if file_fill else None

    def stop_trying(self) -> None:
        """Stop all fills' retries, because the agent ends."""
        for file_fill in self._files.values():
            file_fill.fill.stop.set()

    def _begin(self, files: Sequence[Digest], start: Start, report: FileReport) -> None:
        if not files:
            return
        fill = Fill(report)
        fill.files = {file: FileFill(fill) for file in files}
        self._files.update(fill.files)
        fill.task = self._background.start(_run(fill, start), f"fill {files[0]}")
        # Not in a finally of the task: it never runs if the task is canceled before its first step.
        fill.task.add_done_callback(lambda _: self._forget(files))

    def _forget(self, files: Iterable[Digest]) -> None:
        for file in files:
            del self._files[file]

    def _join(self, file: Digest, joined: dict[Digest, FileFill], report: FileReport, traffic: TrafficClass) -> None:
        if file in joined:
            return
        file_fill = joined[file] = self._files[file]
        if file_fill.done and report is not file_fill.fill.leader:
            report(file, "node", file_fill.done)
        file_fill.listeners[report] = traffic

    @staticmethod
    def _still_waiting(
        waiting: Sequence[Digest],
        joined: dict[Digest, FileFill],
        report: FileReport,
        restart: Callable[[Digest], None],
    ) -> list[Digest]:
        """The files that are not whole yet. Raises the error of the caller's own fill, or of a failed disk."""
        left: list[Digest] = []
        for file in waiting:
            fill = joined[file].fill
            if fill.is_over:
                del joined[file]
            if not fill.has_succeeded:
                left.append(file)
            if fill.error and (fill.leader is report or isinstance(fill.error, DiskFailedError)):
                raise fill.error
            if fill.is_over and not fill.has_succeeded:
                # A led with a grant that expired, or was the last to leave just before B came. B has its own right.
                restart(file)
        return left


async def _leave(files: Iterable[FileFill], report: FileReport) -> None:
    left = list(files)
    for file_fill in left:
        file_fill.listeners.pop(report, None)
    abandoned = [fill for fill in dict.fromkeys(file_fill.fill for file_fill in left) if fill.is_abandoned]
    for fill in abandoned:
        fill.stop.set()  # before cancel, so that the threads do not go through their retries
        fill.task.cancel()
    if abandoned:
        await to_the_end(asyncio.wait([fill.task for fill in abandoned]))


async def _run(fill: Fill, start: Start) -> None:
    try:
        await start(fill)
    except Exception as error:  # noqa: BLE001 - each waiting caller raises it again
        fill.error = error
