"""The mirror, put together: upstreams → copier → store and database → API and data plane."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fastapi import FastAPI

from bdn.core.errors import InUseError, InvalidRequestError
from bdn.core.layout import FileLayout
from bdn.core.ports import ChunkStore
from bdn.core.streaming import StallPolicy
from bdn.mirror.access import Access
from bdn.mirror.api.contents import ContentsService, build_contents_router
from bdn.mirror.api.control import Probes, build_control_router
from bdn.mirror.api.identity import build_identity_router
from bdn.mirror.api.mirrors import build_mirrors_router
from bdn.mirror.api.secrets import build_secrets_router
from bdn.mirror.api.views import MirrorViews
from bdn.mirror.cluster.holdings import Holdings
from bdn.mirror.cluster.membership import Membership
from bdn.mirror.cluster.roll import Roll
from bdn.mirror.database import Database
from bdn.mirror.eviction.evictions import Evictions
from bdn.mirror.eviction.store_eviction import StoreEviction
from bdn.mirror.keys import load_signer
from bdn.mirror.metrics import Metrics
from bdn.mirror.mirroring.copier import Copier
from bdn.mirror.mirroring.flights import Flights
from bdn.mirror.mirroring.ingest import Ingest
from bdn.mirror.mirroring.packer import Packer
from bdn.mirror.mirroring.survey import Surveyor
from bdn.mirror.mirroring.worker import Worker
from bdn.mirror.politeness.budgets import UpstreamBudgets
from bdn.mirror.politeness.metrics import UpstreamMetrics
from bdn.mirror.politeness.patience import Patience, Pause
from bdn.mirror.prefetching.prefetches import Prefetches
from bdn.mirror.repository import mirrors
from bdn.mirror.requests import MirrorRequests
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.shelf import StoreShelf
from bdn.mirror.sign_in.issuer import load_issuer
from bdn.mirror.sign_in.sealing import Keyring
from bdn.mirror.sign_in.secret_table import SecretTable
from bdn.mirror.sign_in.secrets import Secrets
from bdn.mirror.sign_in.sign_ins import SignIns
from bdn.mirror.store_opener import open_store
from bdn.mirror.watch import Watch
from bdn.sources.settings import UpstreamSettings
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.connections import ConnectionPool
from bdn.transfer.pacing import pacer
from bdn.transfer.ranged import RangedReader
from bdn.wire.chunk_server import ChunkServer
from bdn.wire.grants import GrantVerifier
from bdn.wire.service import new_service

_UPSTREAM_TIMEOUT_SECONDS = 60.0
_STALL = StallPolicy()


@dataclass(frozen=True)
class MirrorService:
    """A running mirror: the worker works and the data plane serves; ``api`` is ready for an HTTP server."""

    api: FastAPI
    requests: MirrorRequests
    data_port: int | None
    watch: Watch


@asynccontextmanager
async def open_mirror(
    settings: MirrorSettings,
    *,
    serve: bool = True,
    work: bool = True,
    program: str = "bdn serve",
    pause: Pause = asyncio.sleep,
    clock: Callable[[], float] = time.time,
    stall: StallPolicy = _STALL,
) -> AsyncIterator[MirrorService]:
    """Everything the mirror is made of, in the order of the picture in ARCHITECTURE, until the block ends.

    ``pause`` waits before an upstream is asked again; ``clock`` tells when credentials and identity tokens end and agents are silent;
    ``stall`` when a body of an upstream comes too slowly.
    """
    check_binding(settings)
    keyring = Keyring.parse(settings.secrets_key)
    async with AsyncExitStack() as stack:
        database, store = await _open_memory(stack, settings, program)
        metrics, watch = Metrics(database), Watch()
        secrets = Secrets(settings.secrets_dir, SecretTable(database, keyring))
        issuer = await asyncio.to_thread(load_issuer, settings, clock)

        # upstream → store
        budgets = UpstreamBudgets(settings.transfers, pause=pause)
        metrics.registry.register(UpstreamMetrics(budgets))
        patience = Patience(pause, budgets=budgets)
        surveyor = Surveyor(
            database,
            SignIns(secrets, issuer),
            UpstreamSettings.from_environment(os.environ, settings.egress, settings.r2_endpoint_url),
            ambient_credentials=settings.auth == "off",
            limit_files=settings.limit_files,
            limit_bytes=settings.limit_bytes,
            clock=clock,
            asker=patience,
        )
        store_eviction = StoreEviction(database, store, watch)
        if work:
            await stack.enter_async_context(store_eviction.sweeping())
            ingest, connections = _open_ingest(
                stack, settings, store=store, surveyor=surveyor, patience=patience, stall=stall
            )
            worker = Worker(database, ingest, watch, settings.jobs, metrics.transferred_bytes.inc)
            await stack.enter_async_context(worker.running())
            stack.callback(connections.close)  # first at the end: a worker's last look is not at a silent upstream

        # store → agents
        signer = load_signer(settings.data_dir)
        token = settings.token if settings.auth == "token" else None
        access = Access(token, GrantVerifier([signer.public_key]), database)
        shelf = StoreShelf(store, access, asyncio.get_running_loop())
        data_port = _open_data_plane(stack, settings, shelf, metrics) if serve else None

        # the API
        planner = replace(surveyor, asker=patience.for_a_caller_who_waits())
        requests = MirrorRequests(database, planner, MirrorViews(database, signer, settings.grant_seconds), watch)
        evictions = Evictions(database, store_eviction, watch)
        prefetches = Prefetches(database, signer, settings.grant_seconds, watch)
        roll = Roll(database, clock)
        membership = Membership(database, roll, evictions, prefetches, signer, watch, clock)
        api = new_service("BDN mirror", limit_request_bytes=settings.limit_request_bytes)
        for router in (
            build_mirrors_router(requests, access),
            build_contents_router(ContentsService(database, access, shelf, Holdings(database), data_port)),
            build_control_router(evictions, prefetches, membership, access),
            build_secrets_router(secrets, access),
            build_identity_router(issuer),
            Probes(database, store, metrics).router(),
        ):
            api.include_router(router)
        yield MirrorService(api, requests, data_port, watch)


async def _open_memory(stack: AsyncExitStack, settings: MirrorSettings, program: str) -> tuple[Database, ChunkStore]:
    """What outlives the process: the database at this version's schema, and the store."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    if settings.is_embedded:
        stack.enter_context(single_process(settings.data_dir, program))
    database = Database(settings.effective_database_url)
    stack.push_async_callback(database.close)
    if settings.is_embedded:
        await database.migrate()
        async with database.write() as session:
            await mirrors.release_claims(session)
    else:
        await database.check_version()
    store = await asyncio.to_thread(open_store, settings.effective_store, exclusive=settings.is_embedded)
    return database, store


def _open_ingest(
    stack: AsyncExitStack,
    settings: MirrorSettings,
    *,
    store: ChunkStore,
    surveyor: Surveyor,
    patience: Patience,
    stall: StallPolicy,
) -> tuple[Ingest, ConnectionPool]:
    """Byte threads with connections to upstreams, and what puts them to work."""
    connections = stack.enter_context(
        closing(ConnectionPool(timeout_seconds=_UPSTREAM_TIMEOUT_SECONDS, egress=settings.egress))
    )
    threads = stack.enter_context(closing(ByteThreads(settings.transfers, "copy")))
    ranges = RangedReader(connections, stall=stall)
    copier = Copier(store, ranges, threads, patience.budgets)
    packer = Packer(store, ranges, threads, patience.budgets)
    return Ingest(surveyor.database, surveyor, copier, packer, Flights[FileLayout](), patience), connections


def _open_data_plane(stack: AsyncExitStack, settings: MirrorSettings, shelf: StoreShelf, metrics: Metrics) -> int:
    """Chunks for agents, on a port of their own."""
    pace = pacer(settings.upload_rate)
    server = ChunkServer(shelf, settings.host, settings.data_port, on_sent=metrics.served_bytes.inc, pace=pace)
    # Not on the loop: a worker may be waiting for what it asked of the loop.
    stack.push_async_callback(asyncio.to_thread, server.close)
    server.start()
    return server.port


def check_binding(settings: MirrorSettings) -> None:
    """Without authentication a service is for this machine alone."""
    if settings.auth == "token" and not settings.token:
        raise InvalidRequestError("BDN_AUTH=token needs BDN_TOKEN, the token that callers must send")
    if settings.auth == "off" and settings.host not in ("127.0.0.1", "::1", "localhost"):
        raise InvalidRequestError(f"BDN_HOST={settings.host} is not loopback; set BDN_AUTH=token and BDN_TOKEN first")


@contextmanager
def single_process(data_dir: Path, program: str) -> Iterator[None]:
    """The embedded database is one process's: a second one is told so. The kernel drops the lock with the process."""
    with (data_dir / "mirror.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise InUseError(f"the data directory {data_dir}", (holder,)) from None
        lock.truncate(0)
        lock.write(f"{program} (process {os.getpid()})")
        lock.flush()
        yield
