"""The requests of the control API: stage a grant's files for a job, follow, renew, release."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bdn.core.errors import BdnError, CanceledError, InvalidRequestError, NotFoundError
from bdn.core.source.uri import parse_source
from bdn.disk.threads import in_thread
from bdn.local.hub_cache import HubRepository
from bdn.wire import stage_schema
from bdn.wire.grants import Grant, GrantedMount
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import stage_id_of
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.stage import MountRecord, NodeStage, StageRecord, StageRegistry


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
                root, files = self.path_of(stage.record, mount), self._files_of(stage.record, mount)
                if path.is_relative_to(files):
                    return stage, mount, str(path.relative_to(files))
                if path.is_relative_to(root) and files.is_relative_to(path):  # a folder around the snapshot
                    return stage, mount, "."
        raise NotFoundError(f"a stage of this node that shows {path}")

    # --- commands ---

    async def start(
        self,
        job_id: str,
        token: str,
        ttl_seconds: float | None = None,
        *,
        warm: bool = False,
        view: stage_schema.StageView = "files",
    ) -> NodeStage:
        """Stage a grant's files for a job. Idempotent. A failed, released or half-released stage begins anew.

        With ``warm`` the files are read into memory once the stage is READY, or now if it is READY already.

        With ``view`` ``hub`` the stage shows repositories as the cache of the hub's client has them.

        Raises ``GrantInvalidError``, ``GrantExpiredError``, ``DiskFailedError``, and with ``hub`` ``InvalidRequestError``
        for another source: nothing was begun.
        """
        grant = await self.check(token)
        record = self.record(job_id, token, grant, is_hub=view == "hub")
        record.ttl_seconds, record.warm = ttl_seconds, warm
        record.expires_at = None if ttl_seconds is None else record.created_at + ttl_seconds
        return await self.begin(NodeStage(record))

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

    # --- also for pulls ---

    async def check(self, token: str) -> Grant:
        """Verify a grant for a new stage. Raises ``GrantInvalidError``, ``GrantExpiredError``."""
        if not self.is_node:
            raise InvalidRequestError(
                "this agent is a cache of its cluster and stages nothing (BDN_AGENT_ROLES has no 'node'); send "
                "the request to the agent of the job's node"
            )
        return await self.verify(token)

    async def begin(self, asked: NodeStage) -> NodeStage:
        stage, record = self.registry.enter(asked), asked.record
        async with stage.lock:
            if self.registry.get(record.id) is not stage:  # the record was removed meanwhile
                return await self.begin(asked)
            if stage.is_working or (stage.record.state == "READY" and not stage.is_ending):
                stage.record.grant = record.grant  # may expire later
                stage.record.mirror_id = record.mirror_id
                stage.record.warm = stage.record.warm or record.warm
                await self.lifecycle.renew(stage, record.ttl_seconds or stage.record.ttl_seconds)
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

    def record(self, job_id: str, token: str, grant: Grant, *, is_hub: bool = False) -> StageRecord:
        show = _as_repository if is_hub else _as_files
        return StageRecord(
            id=stage_id_of(job_id, grant.reader, {one.mount_location: show(one) for one in grant.mounts}),
            hub=is_hub,
            job_id=job_id,
            organisation=grant.organisation,
            mirror_id=grant.mirror_id,
            grant=token,
            state="PENDING",
            created_at=self.lifecycle.clock(),
            mounts=[
                MountRecord(
                    mount_location=mount.mount_location,
                    manifest=str(mount.manifest),
                    source=mount.source,
                    commit=mount.commit,
                )
                for mount in grant.mounts
            ],
        )

    def path_of(self, record: StageRecord, mount: MountRecord) -> Path:
        return record.destination or self.lifecycle.views.place(record.id, record.shown_at(mount))

    def _files_of(self, record: StageRecord, mount: MountRecord) -> Path:
        return record.destination or self.lifecycle.views.place(record.id, record.files_at(mount))


def _as_files(mount: GrantedMount) -> str:
    return str(mount.manifest)


def _as_repository(mount: GrantedMount) -> str:
    """Manifest, source and commit: two commits may have equal files. Raises ``InvalidRequestError``."""
    HubRepository.of(parse_source(mount.source), Path("/"))
    if mount.commit is None:
        raise InvalidRequestError(
            f"the grant of {mount.source} names no commit, because an older mirror signed it; update the mirror, and read "
            "the mirror again for a fresh grant"
        )
    return f"{mount.manifest}\0hub\0{mount.source}\0{mount.commit}"
