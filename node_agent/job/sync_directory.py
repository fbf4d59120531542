"""Syncs a directory for ``bdn sync`` (entry point ``sync`` of ``bdn.embedded``), and in the pod of a training job."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from hashlib import sha256
from pathlib import Path
from typing import Final

from bdn.core.source.uri import CheckpointUri
from bdn.disk.durable import make_folder
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities
from bdn.transfer.byte_threads import ByteThreads, pacer
from bdn.wire.mirror_schema import Mirror
from node_agent.job.journal import VolumeJournal
from node_agent.job.pushing import NAMERS, Pusher
from node_agent.job.syncing import SETTLE_SECONDS, Syncer
from node_agent.job.tree import JobDirectory

_SENDERS: Final = 16  # mostly waiting for the mirror to write; with 8 a push was a fifth slower, with 24 no faster
_TIMEOUT_SECONDS: Final = 60.0
_PRIVATE: Final = 0o700


async def sync_directory(
    directory: Path,
    job: CheckpointUri,
    *,
    url: str,
    token: str | None,
    authorities: Authorities,
    data_dir: Path,
    settle_seconds: float,
    rate: int | None,
    is_once: bool,
    on_pushed: Callable[[Mirror], object],
    outages: OutageRetry,
) -> tuple[dict[str, str], Mapping[str, str]]:
    """Push the checkpoints below an absolute directory to the mirror at ``url``, once or continuously.

    Returns the reasons of incomplete checkpoints, by name, and of files skipped in complete checkpoints, by path.
    ``data_dir`` contains the journal. ``on_pushed`` is called after each push. ``rate`` is in bytes per second; None is
    unlimited.
    """
    syncing = opened_syncer(
        directory,
        job,
        url=url,
        token=token,
        authorities=authorities,
        data_dir=data_dir,
        settle_seconds=settle_seconds,
        rate=rate,
        on_pushed=on_pushed,
        outages=outages,
    )
    async with syncing as syncer:
        if is_once:
            return {left: syncer.reasons.get(left, "") for left in await syncer.run_once()}, syncer.skipped
        await syncer.run()
    return {}, {}


@asynccontextmanager
async def opened_syncer(
    directory: Path,
    job: CheckpointUri,
    *,
    url: str,
    token: str | None,
    authorities: Authorities,
    data_dir: Path,
    settle_seconds: float = SETTLE_SECONDS,
    rate: int | None = None,
    most_bytes: int | None = None,
    on_pushed: Callable[[Mirror], object] = lambda _: None,
    outages: OutageRetry,
) -> AsyncIterator[Syncer]:
    """A syncer with threads, connections and a journal of its own. Parameters as of ``sync_directory``."""
    name = sha256(f"{directory}\0{url}\0{job}".encode("utf-8", "surrogateescape")).hexdigest()
    kept = data_dir / "pushed" / f"{name}.journal"
    await in_thread(make_folder, kept.parent, _PRIVATE, is_durable=True)
    async with AsyncExitStack() as stack:
        namers = stack.enter_context(closing(ByteThreads(NAMERS, "naming")))
        senders = stack.enter_context(closing(ByteThreads(_SENDERS, "push")))
        pool = stack.enter_context(closing(ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS, authorities=authorities)))
        mirror = await stack.enter_async_context(MirrorClient(url, token, authorities=authorities))
        journal = VolumeJournal(kept)
        await in_thread(stack.enter_context, journal)
        pusher = Pusher(mirror, pool, namers, senders, outages, pacer(rate))
        yield Syncer(JobDirectory(directory), job, pusher, journal, on_pushed, settle_seconds, most_bytes=most_bytes)
