"""Constructs the job volumes of an agent."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Final

from bdn.core.errors import BdnError
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.disk.syscalls import prefer_others
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities
from bdn.transfer.byte_threads import ByteThreads, pacer
from bdn.wire.grants import PushGrant
from bdn.wire.stage_schema import ExposureKind
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.disk.cache_directory import boot_id
from node_agent.job.bounds import can_make_images
from node_agent.job.shared_caches import SharedCaches
from node_agent.job.sync_directory import NAMERS, Syncers
from node_agent.job.syncing import Syncer
from node_agent.job.volume import Volume, VolumeSpace
from node_agent.job.volume_sync import Pushed, VolumeSync
from node_agent.job.volumes import JobVolumes
from node_agent.settings import AgentSettings

_SENDERS: Final = 4


async def open_volumes(
    stack: AsyncExitStack,
    settings: AgentSettings,
    cache: NodeCache,
    exposure: ExposureKind,
    *,
    pool: ConnectionPool,
    authorities: Authorities,
    outages: OutageRetry,
    verify: Callable[[str], Awaitable[PushGrant]],
    until_idle: Callable[[], Awaitable[None]],
    keep: Callable[[str, str], Awaitable[None]],
    caches: SharedCaches,
    clock: Clock,
) -> JobVolumes:
    """Open the job volumes, including the volumes of the last run. Raises ``DiskFailedError``.

    Pushes wait for ``until_idle``, so stages come first. Volumes are mounted where views are: both need the same
    rights, and jobs see both by the same mount propagation.
    """
    namers = ByteThreads(NAMERS, "agent-naming", on_start=prefer_others)
    stack.push_async_callback(in_thread, namers.close)
    senders = ByteThreads(_SENDERS, "agent-push", on_start=prefer_others)
    stack.push_async_callback(in_thread, senders.close)
    rate = pacer(settings.sync_rate)
    settle = settings.settle_seconds
    syncers = Syncers(
        settings.url,
        authorities,
        pool,
        namers,
        senders,
        outages,
        settle,
        rate,
        until_idle,
        is_noting=True,
        agent_token=settings.token,
    )

    def open_sync(volume: Volume) -> VolumeSync:
        record, checkpoints = volume.record, volume.checkpoints
        assert record.job is not None  # noqa: S101 - a volume with checkpoints has a push grant
        assert checkpoints is not None  # noqa: S101 - called for volumes with checkpoints only
        job = parse_source(record.job)
        assert isinstance(job, CheckpointUri)  # noqa: S101 - from a verified push grant
        place, journal = checkpoints.place, volume.folder / "journal"

        def open_syncer(on_pushed: Pushed) -> AbstractAsyncContextManager[Syncer]:
            return syncers.syncer(place, job, volume.record.push_grant, journal, on_pushed, most_bytes=checkpoints.size)

        return VolumeSync(record.job, open_syncer, is_after_restart=record.boot != boot_id())

    async def keep_newest(volume_id: str, grant: str) -> None:
        if settings.keep_checkpoint:
            with suppress(BdnError):  # logged; the checkpoint is then fetched when it is staged
                await keep(volume_id, grant)

    root = settings.effective_scratch_dir.absolute()
    volumes = JobVolumes(
        root=root,
        space=VolumeSpace(cache, root, settings.headroom_bytes),
        background=await stack.enter_async_context(BackgroundTasks()),
        bound="watch",
        scratch_bytes=settings.scratch_bytes,
        unsynced_seconds=settings.unsynced_seconds,
        is_node="node" in settings.roles,
        clock=clock,
        verify=verify,
        open_sync=open_sync,
        keep=keep_newest,
        caches=caches,
    )
    if volumes.is_node:
        await in_thread(volumes.make)
        if exposure == "bind" and await in_thread(can_make_images, root):
            volumes.bound = "image"
        await asyncio.to_thread(stack.enter_context, volumes.trash)
        await volumes.resume()
        volumes.background.start(volumes.run(), "job volumes")
    return volumes
