"""Training caches on this node: mounted for jobs, measured while in use, and removed on request.

A deleted project's cache is never removed under a job, on whatever node, by the order of the steps:

    a mount                                        a removal
    1. the mirror records which job mounts it      1. the marker of the deleted project is written
    2. the marker is looked up: there is none      2. the mirror says which jobs have it mounted: none
    3. the directories are opened for the job      3. the directory is renamed into the trash

Each side writes before it reads, so one of them sees the other: a removal that sees no mount wrote its marker before
the mount's look-up, which finds it. A mirror that does not answer stops both before step 3.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self

from bdn.core.errors import (
    BdnError,
    CacheNotSharedError,
    CanceledError,
    GrantInvalidError,
    InUseError,
    LimitExceededError,
    NotFoundError,
)
from bdn.core.training.cache_summary import CacheSummary
from bdn.disk.syscalls import prefer_others
from bdn.disk.threads import in_thread, to_the_end
from bdn.net.api_clients import MirrorClient
from bdn.wire.cache_schema import (
    CacheSummaryBody,
    CacheSummaryDocument,
    FileSummary,
    Removal,
    RemovalRequest,
    RemoveCacheCommand,
    RemoveCacheReport,
    SharedCache,
    SharedCachesDocument,
    pack,
)
from bdn.wire.grants import CacheGrant
from bdn.wire.heartbeat_schema import CacheUse, Report
from bdn.wire.job_schema import CacheFolders
from bdn.wire.shapes import LARGEST
from node_agent.background_tasks import happens_within
from node_agent.job.cache_volume import CacheVolume
from node_agent.job.cache_walk import summarized

logger = logging.getLogger(__name__)
CAPTURE_SECONDS: Final = 600.0
_AGAIN_SECONDS: Final = 60.0  # after a failed capture or removal, and between two scans for the volume's id
_MOUNTED, _HOLDERS = 1000, 1000  # most in one heartbeat
_PACKED_LIMIT: Final = 2_800_000  # characters: the mirror accepts 4 MiB per request


@dataclass
class _Use:
    """A project whose cache is mounted, or was until its last summary. ``due_at`` is monotonic seconds."""

    holders: set[str] = field(default_factory=set)
    due_at: float = 0.0
    captured_at: datetime | None = None


@dataclass(eq=False)
class SharedCaches:
    """The caches of one volume. A context manager, which owns the walking thread. One event loop.

    A holder is registered before the cache is opened and released after it is unmounted. Holders do not survive a
    restart.

    Args:
        cluster: this node's.
        client: for summaries.
        verify: the grant of a token; raises ``GrantInvalidError``, ``GrantExpiredError``.
        elapsed: monotonic seconds.
        report: reports mounted caches to the mirror, before a job may use one.
        on_release: called when a holder unmounts a cache.
        clock: the time of day.
    """

    volume: CacheVolume
    cluster: str
    client: MirrorClient
    verify: Callable[[str], Awaitable[CacheGrant]]
    elapsed: Callable[[], float]
    clock: Callable[[], float]
    report: Callable[[], Awaitable[None]]
    on_release: Callable[[], None]
    _uses: dict[str, _Use] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "cache-summary", initializer=prefer_others)
    )
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    volume_id: str | None = None  # from the last scan

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop_walking()
        self._thread.shutdown()

    def stop_walking(self) -> None:
        """Cancel the running measurement and all later ones."""
        self._stop.set()

    async def mount(self, token: str, holder: str, *, huggingface: bool) -> CacheFolders:
        """Create the directories of a grant where missing; first registers ``holder`` and reports it to the mirror.

        Raises as ``granted``, also for a deleted project, and the mirror's errors: without its answer nothing is mounted.
        """
        grant = await self.granted(token)
        self.hold(grant.project, holder)
        try:
            await self.report()
            return await in_thread(self.volume.open, grant, huggingface=huggingface)
        except BaseException:
            self.release(holder)
            raise

    async def granted(self, token: str) -> CacheGrant:
        """Verify a grant for this node.

        Raises:
            GrantInvalidError, GrantExpiredError: not a grant for this cluster.
            CacheNotSharedError: this node has another volume.
            DiskFailedError: the volume cannot be used.
        """
        grant = await self.verify(token)
        if grant.cluster != self.cluster:
            raise GrantInvalidError(f"it is for cluster {grant.cluster}, and this node is in cluster {self.cluster}")
        volume = await self.identified()
        if volume != grant.volume:
            raise CacheNotSharedError(self.cluster, grant.volume, volume)
        return grant

    def hold(self, project: str, holder: str) -> None:
        """Register a job that has mounted the project's cache or is about to."""
        use = self._uses.setdefault(project, _Use())
        if not use.holders:
            use.due_at = self.elapsed() + CAPTURE_SECONDS
        use.holders.add(holder)

    def release(self, holder: str) -> None:
        """Release all caches of ``holder``. After the last release a cache is measured once more."""
        for use in self._uses.values():
            if holder in use.holders:
                use.holders.remove(holder)
                self.on_release()
                if not use.holders:
                    use.due_at = self.elapsed()
                    self._wake.set()

    def mounted(self) -> list[CacheUse]:
        """For heartbeats: at most 1000 projects with 1000 holders each."""
        return [
            CacheUse(project=project, holders=sorted(use.holders)[:_HOLDERS])
            for project, use in sorted(self._uses.items())
            if use.holders
        ][:_MOUNTED]

    async def document(self) -> SharedCachesDocument:
        """The mounted caches and the volume's id, created if missing. Raises ``DiskFailedError``."""
        items = [
            SharedCache(project_id=project, holders=sorted(use.holders), captured_at=use.captured_at)
            for project, use in sorted(self._uses.items())
        ]
        return SharedCachesDocument(
            cluster=self.cluster, root=str(self.volume.root), volume_id=await self.identified(), items=items
        )

    async def capture(self, project: str) -> CacheSummaryDocument:
        """Measure a cache now and report it to the mirror.

        Raises ``NotFoundError`` if the project (an id) has no cache here; ``DiskFailedError``; the mirror's errors.
        """
        path = await in_thread(self.volume.project, project)
        loop = asyncio.get_running_loop()
        captured_at = datetime.fromtimestamp(self.clock(), UTC)

        async def walk() -> CacheSummary:
            return await loop.run_in_executor(self._thread, summarized, path, self._stop)

        summary = await to_the_end(walk())
        files = await self._tell(project, captured_at, summary)
        if project in self._uses:
            self._uses[project].captured_at = captured_at
        return CacheSummaryDocument(timestamp=captured_at, project_id=project, file_summaries=files)

    async def _tell(self, project: str, captured_at: datetime, summary: CacheSummary) -> list[FileSummary]:
        """Report a summary; folds it until the mirror accepts its size. Returns the entries that were sent."""
        while True:
            files, packed = await in_thread(_packed, summary)
            body = CacheSummaryBody(
                volume_id=await self.identified(),
                timestamp=captured_at,
                size_bytes=min(summary.size, LARGEST),
                files=summary.files,
                packed=packed,
            )
            try:
                await self.client.record_cache_summary(project, self.cluster, body)
            except BdnError as error:
                if error.code != LimitExceededError.code or not summary.fold():
                    raise
            else:
                return files

    async def remove(self, request: RemovalRequest) -> Removal:
        """Remove a path below a cache; deletion runs in the background.

        The path is whole or absent for a job that mounts the cache at this moment.

        Raises:
            InUseError: the project is in use on any node (``bdn.mirror.jobs.uses``), and ``force`` is not set.
            NotFoundError: the path does not exist.
            InvalidRequestError, DiskFailedError: the path is invalid or cannot be removed.
            BdnError: the mirror's errors, unless ``force`` is set.
        """
        if not request.force:
            await self.report()  # jobs of this node that have just ended
            await self._check_unused(request.project)
        await in_thread(self.volume.remove, request.project, request.path)
        logger.info("removed from a training cache", extra={"project": request.project, "path": request.path})
        return Removal(project_id=request.project, path=request.path)

    async def run(self, command: RemoveCacheCommand, tell: Callable[[Report], None]) -> None:
        """Remove the caches of a deleted project. Retries until it succeeds."""
        complaint = ""
        while (problem := await self._forgotten(command, tell)) is not None:
            if str(problem) != complaint:
                complaint = str(problem)
                logger.warning(
                    "cannot remove the training cache of project %s yet; retrying once a minute: %s",
                    command.project,
                    problem,
                )
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _forgotten(self, command: RemoveCacheCommand, tell: Callable[[Report], None]) -> BdnError | None:
        """Returns None if the caches were removed and the report was sent."""
        found = await in_thread(self.volume.known_id)
        if found != command.volume_id:
            return CacheNotSharedError(self.cluster, command.volume_id, found or "none")
        try:
            await in_thread(self.volume.close_project, command.organisation, command.project)
            await self._check_unused(command.project)
            removed = await in_thread(self.volume.remove_project, command.organisation, command.project)
        except BdnError as error:
            return error
        tell(Report(id=command.id, remove_cache=RemoveCacheReport(removed=removed)))
        return None

    async def _check_unused(self, project: str) -> None:
        if uses := (await self.client.project_uses(project)).items:
            raise InUseError(f"the training cache of project {project}", tuple(uses))

    async def look(self) -> None:
        self.volume_id = await in_thread(self.volume.known_id)

    async def keep(self) -> None:
        """Measure caches in use periodically, and each cache once more after its last release."""
        while True:
            await self.look()
            for project, use in list(self._uses.items()):
                if use.due_at <= self.elapsed():
                    await self._capture_due(project, use)
            self._wake.clear()
            due_at = min((use.due_at for use in self._uses.values()), default=float("inf"))
            await happens_within(min(_AGAIN_SECONDS, max(0.0, due_at - self.elapsed())), self._wake)

    async def _capture_due(self, project: str, use: _Use) -> None:
        was_held = bool(use.holders)
        use.due_at = self.elapsed() + (CAPTURE_SECONDS if was_held else _AGAIN_SECONDS)
        try:
            await self.capture(project)
        except NotFoundError:
            pass
        except CanceledError:
            return
        except BdnError as error:
            is_gone = error.code == NotFoundError.code
            if not is_gone:
                use.due_at = self.elapsed() + _AGAIN_SECONDS
                logger.warning(
                    "cannot measure the training cache of project %s; retrying in a minute: %s", project, error
                )
                return
        except Exception:
            logger.exception("cannot measure the training cache of project %s", project)  # a bug must not end the agent
            return
        if not was_held and not use.holders:
            self._uses.pop(project, None)

    async def identified(self) -> str:
        """The volume's id, created if missing. Raises ``DiskFailedError``."""
        self.volume_id = await in_thread(self.volume.id)
        return self.volume_id


def _packed(summary: CacheSummary) -> tuple[list[FileSummary], str]:
    """Folds entries until they fit the size limit. Blocking."""
    while True:
        files = list(map(FileSummary.of, summary.entries()))
        packed = pack(files)
        if len(packed) <= _PACKED_LIMIT or not summary.fold():
            return files, packed
