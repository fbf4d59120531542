"""What the agent is asked to do: stage a grant's files for a job or at a directory, follow, renew, release."""

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
    """The service behind the control API and behind embedding commands. Safe to call at the same time, for one stage, too."""

    registry: StageRegistry
    lifecycle: Lifecycle
    verify: Callable[[str], Awaitable[Grant]]
    is_node: bool  # whether this agent has the role

    # --- asking ---

    def document(self, stage: NodeStage) -> stage_schema.StageDocument:
        """The stage as the wire shows it."""
        return stage.document(lambda mount: str(self.path_of(stage.record, mount)))

    async def follow(self, stage_id: str, interval_seconds: float = 0.5) -> AsyncGenerator[stage_schema.StageDocument]:
        """The stage's document again and again, at least every interval, the last time in a terminal state."""
        stage = self.registry.find(stage_id)
        while not stage.is_terminal:
            yield self.document(stage)
            await stage.wait(interval_seconds)
        yield self.document(stage)

    async def finish(self, stage_id: str) -> stage_schema.StageDocument:
        """Wait for a stage to be READY, and whole as far as anybody knows.

        Raises ``BdnError``: why it failed, or what a READY one lacks, or that it was released meanwhile.
        """
        stage = self.registry.find(stage_id)
        await stage.wait(None)
        if stage.record.state != "READY" or stage.record.error:
            raise ReportedError(stage.record.error) if stage.record.error else CanceledError(f"stage {stage_id}")
        return self.document(stage)

    def showing(self, path: PurePosixPath) -> tuple[NodeStage, MountRecord, str]:
        """The stage that shows the path now, or else the one that was asked for last; its mount, and the path below that."""
        if not path.is_absolute():
            raise InvalidRequestError(f"{path} is not an absolute path")
        for stage in sorted(self.registry.all(), key=lambda stage: stage.record.state != "READY"):
            for mount in stage.record.mounts:
                root = self.path_of(stage.record, mount)
                if path.is_relative_to(root):
                    return stage, mount, str(path.relative_to(root))
        raise NotFoundError(f"a stage of this node that shows {path}")

    # --- doing ---

    async def start(
        self, job_id: str, token: str, ttl_seconds: float | None = None, *, warm: bool = False
    ) -> NodeStage:
        """Stage a grant's files for a job; asking again is asking once. A failed or released stage begins anew.

        So does one that could be released half-way only. With ``warm`` the files are read into memory once the stage is READY;
        one that is READY already begins with it.

        Raises ``GrantInvalidError``, ``GrantExpiredError``, ``DiskFailedError``: nothing was begun.
        """
        grant = await self._verify(token)
        record = self._record(job_id, token, grant)
        record.ttl_seconds, record.warm = ttl_seconds, warm
        record.expires_at = None if ttl_seconds is None else record.created_at + ttl_seconds
        return await self._start(NodeStage(record))

    async def pull(self, token: str, destination: Path, *, link: bool = False) -> NodeStage:
        """Stage a grant's only manifest and publish it at a directory; the same again, while it is intact, is immediate.

        Its files share blocks with those of the cache, or are copies. With ``link`` they are the cache's own files, on one file
        system: they take no room, and who writes into one changes what the cache holds, which is noticed before it is used.

        The directory is the lease's holder: once it is gone, the stage is released.

        Raises:
            InvalidRequestError: the directory holds what is not ours. Nothing was begun.
            GrantInvalidError, GrantExpiredError, DiskFailedError: likewise.
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
            record.inode = earlier.inode  # of the directory that this pull replaces
        if known and is_ready:
            await self.lifecycle.release(known)
        return await self._start(NodeStage(record, earlier))

    async def check_destination(self, destination: Path) -> None:
        """Refuse a directory where no pull could be published; raises ``InvalidRequestError``."""
        path = await in_thread(resolved, destination)
        # Whether what stands there is intact is looked at later, once: that takes a while for many files.
        if not await in_thread(self.lifecycle.stands_at, path):
            await in_thread(Destination(path, "check", self.lifecycle.views.files, 0).check, None)

    async def would_lose(self, token: str, destination: Path) -> PullLosses:
        """What an earlier pull put at the directory and this one would remove or replace."""
        earlier = await self.earlier(destination)
        if earlier is None:
            return PullLosses()
        kept = {(file.path, file.digest) for file in (await self.coming(token)).files}
        lost = [file.path for file in earlier.files if (file.path, file.digest) not in kept]
        return PullLosses(earlier=str(earlier.digest), lost=lost)

    async def earlier(self, destination: Path) -> Manifest | None:
        """What an earlier pull put at the directory that stands there now, as far as it is known."""
        path = await in_thread(resolved, destination)
        if not await in_thread(self.lifecycle.stands_at, path):
            return None
        found = await in_thread(self.lifecycle.published_at, path)
        return None if found is None else found.manifest

    async def coming(self, token: str) -> Manifest:
        """A grant's only manifest. It is not taken into the cache."""
        (mount,) = (await self.verify(token)).mounts
        return (await self.lifecycle.provision.catalogue.obtain(mount.manifest, token, is_complete=True)).manifest

    async def renew(self, stage_id: str, ttl_seconds: float | None) -> NodeStage:
        """A new time to live, from now on; None means until the stage is released."""
        stage = self.registry.find(stage_id)
        async with stage.lock:
            if stage.record.state in ("FAILED", "RELEASED"):
                raise InvalidRequestError(f"stage {stage_id} is {stage.record.state}; stage it again")
            if stage.is_ending:
                raise InvalidRequestError(f"stage {stage_id} is being taken down; stage it again")
            await self.lifecycle.renew(stage, ttl_seconds)
        return stage

    async def release(self, stage_id: str) -> NodeStage:
        """Unmount, drop the view, end the lease. Idempotent. The files stay cached; a pulled directory stays altogether."""
        stage = self.registry.find(stage_id)
        await self.lifecycle.release(stage)
        return stage

    # --- inside ---

    async def _verify(self, token: str) -> Grant:
        if not self.is_node:
            raise InvalidRequestError(
                "this agent is a cache of its cluster and stages nothing (BDN_AGENT_ROLES has no 'node'); ask the agent of "
                "the node where the files shall be"
            )
        return await self.verify(token)

    async def _start(self, asked: NodeStage) -> NodeStage:
        stage, record = self.registry.enter(asked), asked.record
        async with stage.lock:
            if self.registry.get(record.id) is not stage:  # it was forgotten while this waited
                return await self._start(asked)
            if stage.is_working or (stage.record.state == "READY" and not stage.is_ending):
                stage.record.grant = record.grant  # it may be a fresher one
                stage.record.warm = stage.record.warm or record.warm
                await self.lifecycle.renew(stage, record.ttl_seconds or stage.record.lifetime)
                if stage.record.state != "READY":  # it is on its way, or has failed by now
                    return stage
                if not stage.is_working and await in_thread(self.lifecycle.is_changed, stage.record):
                    stage.mend_at = self.lifecycle.elapsed()
                if not stage.is_working and self.lifecycle.is_lacking(stage):
                    self.lifecycle.mend(stage)  # who asks now hears whether it is whole, and not that it once was
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
        """Where its job sees the mount."""
        return record.destination or self.lifecycle.views.place(record.id, mount.mount_location)
