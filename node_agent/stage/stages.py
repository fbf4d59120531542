"""The requests of the control API: stage a grant's files for a job or in a directory, follow, renew, release."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bdn.core.errors import BdnError, CanceledError, InvalidRequestError, NotFoundError
from bdn.core.layout import Manifest
from bdn.wire import stage_schema
from bdn.wire.grants import Grant
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import PullLosses, stage_id_of
from node_agent.background_tasks import in_thread
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.stage import MountRecord, NodeStage, StageRecord, StageRegistry
from node_agent.stage.view.destination import Destination, resolved


@dataclass(frozen=True)
class StageService:
    """The service behind the control API and embedding commands. Safe to call concurrently, also for one stage."""

    registry: StageRegistry
    lifecycle: Lifecycle
    verify: Callable[[str], Awaitable[Grant]]
    is_node: bool

    # --- queries ---

    def document(self, stage: NodeStage) -> stage_schema.StageDocument:
        return stage.document(lambda mount: str(self.path_of(stage.record, mount)))

    async def follow(self, stage_id: str, interval_seconds: float = 0.5) -> AsyncGenerator[stage_schema.StageDocument]:
        """Yields the document at least every ``interval_seconds``, the last time in a terminal state."""
        stage = self.registry.find(stage_id)
        while not stage.is_terminal:
            yield self.document(stage)
            await stage.wait(interval_seconds)
        yield self.document(stage)

    async def finish(self, stage_id: str) -> stage_schema.StageDocument:
        """Wait until a stage is READY and complete as far as known.

        Raises ``BdnError``: the stage failed, lacks files, or was released meanwhile.
        """
        stage = self.registry.find(stage_id)
        await stage.wait(None)
        if stage.record.state != "READY" or stage.record.error:
            raise ReportedError(stage.record.error) if stage.record.error else CanceledError(f"stage {stage_id}")
        return self.document(stage)

    def showing(self, path: PurePosixPath) -> tuple[NodeStage, MountRecord, str]:
        """The stage that shows ``path``, its mount, and the path inside the mount.

        Prefers READY, then the newest stage.
        """
        if not path.is_absolute():
            raise InvalidRequestError(f"{path} is not an absolute path")
        for stage in sorted(self.registry.all(), key=lambda stage: stage.record.state != "READY"):
            for mount in stage.record.mounts:
                root = self.path_of(stage.record, mount)
                if path.is_relative_to(root):
                    return stage, mount, str(path.relative_to(root))
        raise NotFoundError(f"a stage of this node that shows {path}")

    # --- commands ---

    async def start(
        self, job_id: str, token: str, ttl_seconds: float | None = None, *, warm: bool = False
    ) -> NodeStage:
        """Stage a grant's files for a job. Idempotent. A failed, released or half-released stage begins anew.

        With ``warm`` the files are read into memory once the stage is READY, or now if it is READY already.

        Raises ``GrantInvalidError``, ``GrantExpiredError``, ``DiskFailedError``: nothing was begun.
        """
        grant = await self._verify(token)
        record = self._record(job_id, token, grant)
        record.ttl_seconds, record.warm = ttl_seconds, warm
        record.expires_at = None if ttl_seconds is None else record.created_at + ttl_seconds
        return await self._start(NodeStage(record))

    async def pull(self, token: str, destination: Path, *, link: bool = False) -> NodeStage:
        """Stage a grant's only manifest and publish it at a directory. Immediate if an intact equal pull exists.

        Files share blocks with the cache or are copies. With ``link``, on one file system, they are hard links to
        the cache: they use no space, and a write to one changes the cached file, which is detected before its next use.

        The directory holds the lease: once it is gone, the stage is released.

        Raises:
            InvalidRequestError: the directory contains files that BDN did not publish. Nothing was begun.
            GrantInvalidError, GrantExpiredError, DiskFailedError: nothing was begun.
        """
        grant = await self._verify(token)
        if len(grant.mounts) != 1:
            raise InvalidRequestError(f"a pull takes a grant for one source, not for {len(grant.mounts)}")
        path = await in_thread(resolved, destination)
        record = self._record(f"pull:{path}", token, grant)
        record.destination, record.link = path, link
        known = self.registry.get(record.id)
        if known and known.is_working:
            return known
        is_ready = known is not None and known.record.state == "READY"
        is_intact = self.lifecycle.is_intact_pull
        is_alike = known is not None and known.record.is_linked(link)
        if known and is_alike and is_ready and not known.is_ending and await in_thread(is_intact, known.record):
            return known
        earlier = await in_thread(self.lifecycle.check_destination, record)
        if earlier and str(earlier.digest) == record.mounts[0].manifest:
            record.inode = earlier.inode  # the directory that this pull replaces
        if known and is_ready:
            await self.lifecycle.release(known)
        return await self._start(NodeStage(record, earlier))

    async def check_destination(self, destination: Path) -> None:
        """Raises ``InvalidRequestError`` if no pull could be published at the directory."""
        path = await in_thread(resolved, destination)
        # A present publication is verified later, once: that is slow for many files.
        if not await in_thread(self.lifecycle.stands_at, path):
            await in_thread(Destination(path, "check", self.lifecycle.views.files, 0).check, None)

    async def would_lose(self, token: str, destination: Path) -> PullLosses:
        """Files of an earlier pull that this pull would remove or replace."""
        earlier = await self.earlier(destination)
        if earlier is None:
            return PullLosses()
        kept = {(file.path, file.digest) for file in (await self.coming(token)).files}
        lost = [file.path for file in earlier.files if (file.path, file.digest) not in kept]
        return PullLosses(earlier=str(earlier.digest), lost=lost)

    async def earlier(self, destination: Path) -> Manifest | None:
        """The manifest that an earlier pull published at the directory, if known."""
        path = await in_thread(resolved, destination)
        if not await in_thread(self.lifecycle.stands_at, path):
            return None
        found = await in_thread(self.lifecycle.published_at, path)
        return None if found is None else found.manifest

    async def coming(self, token: str) -> Manifest:
        """A grant's only manifest, without caching it."""
        (mount,) = (await self.verify(token)).mounts
        return (await self.lifecycle.provision.catalogue.obtain(mount.manifest, token, is_complete=True)).manifest

    async def renew(self, stage_id: str, ttl_seconds: float | None) -> NodeStage:
        """Let the stage expire ``ttl_seconds`` from now; None: when it is released."""
        stage = self.registry.find(stage_id)
        async with stage.lock:
            if stage.record.state in ("FAILED", "RELEASED"):
                raise InvalidRequestError(f"stage {stage_id} is {stage.record.state}; stage it again")
            if stage.is_ending:
                raise InvalidRequestError(f"stage {stage_id} is being taken down; stage it again")
            await self.lifecycle.renew(stage, ttl_seconds)
        return stage

    async def release(self, stage_id: str) -> NodeStage:
        """Unmount, drop the view, end the lease. Idempotent. Cached files and a pulled directory stay."""
        stage = self.registry.find(stage_id)
        await self.lifecycle.release(stage)
        return stage

    # --- internals ---

    async def _verify(self, token: str) -> Grant:
        if not self.is_node:
            raise InvalidRequestError(
                "this agent is a cache of its cluster and stages nothing (BDN_AGENT_ROLES has no 'node'); send "
                "the request to the agent of the job's node"
            )
        return await self.verify(token)

    async def _start(self, asked: NodeStage) -> NodeStage:
        stage, record = self.registry.enter(asked), asked.record
        async with stage.lock:
            if self.registry.get(record.id) is not stage:  # the record was removed meanwhile
                return await self._start(asked)
            if stage.is_working or (stage.record.state == "READY" and not stage.is_ending):
                stage.record.grant = record.grant  # may expire later
                stage.record.warm = stage.record.warm or record.warm
                await self.lifecycle.renew(stage, record.ttl_seconds or stage.record.lifetime)
                if stage.record.state != "READY":  # still staging, or failed meanwhile
                    return stage
                if not stage.is_working and await in_thread(self.lifecycle.is_changed, stage.record):
                    stage.mend_at = self.lifecycle.elapsed()
                if not stage.is_working and self.lifecycle.is_lacking(stage):
                    self.lifecycle.mend(stage)  # the caller waits for the mended stage
                if record.warm and not stage.is_working:
                    self.lifecycle.warmer.begin(stage)
                return stage
            try:
                await in_thread(self.lifecycle.records.note, record)
            except BdnError:
                if stage.record is record:
                    self.registry.strike(stage)
                raise
            stage.record, stage.earlier = record, asked.earlier
            self.lifecycle.live_on(stage)
            self.lifecycle.begin(stage)
        return stage

    def _record(self, job_id: str, token: str, grant: Grant) -> StageRecord:
        return StageRecord(
            id=stage_id_of(job_id, grant.reader, {one.mount_location: str(one.manifest) for one in grant.mounts}),
            job_id=job_id,
            organisation=grant.organisation,
            grant=token,
            state="PENDING",
            created_at=self.lifecycle.clock(),
            mounts=[
                MountRecord(mount_location=mount.mount_location, manifest=str(mount.manifest), source=mount.source)
                for mount in grant.mounts
            ],
        )

    def path_of(self, record: StageRecord, mount: MountRecord) -> Path:
        return record.destination or self.lifecycle.views.place(record.id, mount.mount_location)
