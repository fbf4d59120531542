"""Constructs syncers: for job volumes, and the one of ``bdn sync`` (entry point ``sync`` of ``bdn.embedded``)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Semaphore
from typing import Final

from bdn.core.source.uri import CheckpointUri
from bdn.disk.durable import make_folder
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities
from bdn.transfer.byte_threads import ByteThreads, pacer
from bdn.wire.mirror_schema import Mirror
from node_agent.background_tasks import in_thread
from node_agent.job.journal import VolumeJournal
from node_agent.job.pushing import Pace, Pusher
from node_agent.job.syncing import FILES_LIMIT, Found, Syncer
from node_agent.job.tree import JobDirectory

NAMERS: Final = 2  # with 1 a push was a tenth slower, with 4 no faster
_SENDERS: Final = 16  # mostly waiting for the mirror to write; with 8 a push was a fifth slower, with 24 no faster
_WALKS: Final = 2  # at once, over all volumes: in a directory of the deepest kind each holds 128 of 1,024 descriptors
_TIMEOUT_SECONDS: Final = 60.0
_PRIVATE: Final = 0o700


@dataclass(frozen=True)
class Syncers:
    """Shared by all syncers of a process: the mirror at ``url``, connections, and the threads that hash and send."""

    url: str
    authorities: Authorities
    pool: ConnectionPool
    namers: ByteThreads
    senders: ByteThreads
    outages: OutageRetry
    settle_seconds: float
    pace: Pace | None = None
    turn: Callable[[], Awaitable[None]] | None = None
    is_noting: bool = False
    agent_token: str | None = field(default=None, repr=False)
    walks: Semaphore = field(default_factory=partial(Semaphore, _WALKS))

    @asynccontextmanager
    async def syncer(
        self,
        directory: Path,
        job: CheckpointUri,
        token: str | None,
        journal: Path,
        on_pushed: Callable[[Found, Mirror], object],
        *,
        most_bytes: int | None = None,
    ) -> AsyncIterator[Syncer]:
        """A syncer for an absolute directory; ``journal`` is the file that records what was sent.

        Raises ``DiskFailedError``.
        """
        async with AsyncExitStack() as stack:
            client = MirrorClient(self.url, token, agent_token=self.agent_token, authorities=self.authorities)
            mirror = await stack.enter_async_context(client)
            pusher = Pusher(
                mirror, self.url, self.pool, self.namers, self.senders, token, self.outages, self.pace, self.turn
            )
            kept = stack.enter_context(await in_thread(VolumeJournal, journal))
            files = JobDirectory(directory, FILES_LIMIT, self.walks)
            yield Syncer(files, job, pusher, kept, on_pushed, self.settle_seconds, self.is_noting, most_bytes)


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

    def tell(_: Found, mirror: Mirror) -> None:
        on_pushed(mirror)

    name = sha256(f"{directory}\0{url}\0{job}".encode("utf-8", "surrogateescape")).hexdigest()
    kept = data_dir / "pushed" / f"{name}.journal"
    await in_thread(make_folder, kept.parent, _PRIVATE, is_durable=True)
    async with AsyncExitStack() as stack:
        namers = stack.enter_context(closing(ByteThreads(NAMERS, "naming")))
        senders = stack.enter_context(closing(ByteThreads(_SENDERS, "push")))
        pool = stack.enter_context(closing(ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS, authorities=authorities)))
        syncers = Syncers(url, authorities, pool, namers, senders, outages, settle_seconds, pacer(rate))
        syncer = await stack.enter_async_context(syncers.syncer(directory, job, token, kept, tell))
        if is_once:
            return {left: syncer.reasons.get(left, "") for left in await syncer.run_once()}, syncer.skipped
        await syncer.run()
    return {}, {}
