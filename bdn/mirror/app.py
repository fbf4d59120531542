"""Composition of the mirror: ``open_mirror`` builds the parts from top to bottom, from upstreams to agents."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from fastapi import FastAPI

from bdn.core.errors import InvalidRequestError
from bdn.core.pace.retry import RetryPolicy, StallPolicy
from bdn.core.store import LocatableStore
from bdn.disk.durable import disk_errors, make_folder
from bdn.mirror.access.access import Access
from bdn.mirror.access.clusters import KubernetesCluster, load_clusters
from bdn.mirror.access.key_files import load_grant_signer
from bdn.mirror.access.service_accounts import ServiceAccounts
from bdn.mirror.access.sessions import Sessions
from bdn.mirror.api.metrics import Metrics
from bdn.mirror.api.routes import ROUTERS, ContentsService
from bdn.mirror.api.uploads import UPLOADS, UploadEndpoint
from bdn.mirror.api.v1 import ClientApi
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.chunks.opening import check_owner, check_secret_files, opened_store
from bdn.mirror.db import mirrors, training
from bdn.mirror.db.chunks import end_deletions
from bdn.mirror.db.data_lock import DataLock, locked
from bdn.mirror.db.database import Database
from bdn.mirror.db.events import Events
from bdn.mirror.db.identity import database_id
from bdn.mirror.db.secrets import Keyring, SecretTable
from bdn.mirror.db.tokens import TokenTable
from bdn.mirror.db.training import active_jobs
from bdn.mirror.db.waiting import Watch, in_background, repeated
from bdn.mirror.hub.copies import GatewayCopies
from bdn.mirror.hub.gateway import GatewayRules, HubGateway
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.ingest.progress import CopyProgress
from bdn.mirror.ingest.requests import MirrorRequests, prune
from bdn.mirror.ingest.room import RoomForSources
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.ingest.worker import Ingest, Worker
from bdn.mirror.jobs.archives import Archives
from bdn.mirror.jobs.caches import TrainingCaches
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.jobs.pushes import PushedChunks, Pushes
from bdn.mirror.jobs.uses import ProjectUses, active_pushes, mounted_caches
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.job_stages import JobStages
from bdn.mirror.operations.names import Names
from bdn.mirror.operations.operations import Operations
from bdn.mirror.operations.requests import Collections, OperationRequests
from bdn.mirror.page.entry import PAGE, OperatorPage
from bdn.mirror.page.sources import Sources
from bdn.mirror.serving.locations import ChunkLocations
from bdn.mirror.serving.served_chunks import StoreShelf
from bdn.mirror.serving.served_files import ServedFiles
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.training.controller import Controller
from bdn.mirror.training.described import Describer
from bdn.mirror.training.jobs import TrainingJobs
from bdn.mirror.training.kubernetes_api import KubernetesApi
from bdn.mirror.training.logs import Logs
from bdn.mirror.training.pods import Pods
from bdn.mirror.training.runs import JobRuns
from bdn.mirror.training.steps import Steps
from bdn.mirror.upkeep.collection import Collector
from bdn.mirror.upkeep.eviction import StoreEviction
from bdn.mirror.upkeep.repair import AgentSource, Repair
from bdn.mirror.upkeep.scrub import Keeper
from bdn.mirror.upstream.budget import Pause, UpstreamBudgets, UpstreamMetrics
from bdn.mirror.upstream.issuer import load_issuer
from bdn.mirror.upstream.reader import UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.mirror.upstream.sign_ins import OperatorSecrets, Secrets, SignIns
from bdn.net.api_server import new_service
from bdn.net.chunk_server.receiving import ReceiveBuffers
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, Certificate, certificate
from bdn.sources.huggingface.forwarding import HubForwarder
from bdn.sources.sign_in import SourceContext
from bdn.store.opener import bucket_of
from bdn.transfer.byte_threads import ByteThreads, pacer
from bdn.transfer.ranged import RangedReader
from bdn.wire.grants import GrantVerifier
from bdn.wire.http_fields import bearer_of, is_loopback

_STALL: Final = StallPolicy()
_STARTING: Final = RetryPolicy(outage_seconds=0, attempts=3)  # at start, if the database drops the first connection
_STORE_READERS: Final = (
    64  # threads; more than the bucket chunks that clients may hold, so that one organisation cannot take all
)
_HUB_REQUESTS: Final = 16  # threads: requests of gateways in flight
_UPSTREAM_TIMEOUT_SECONDS: Final = 60.0
_AGENT_TIMEOUT_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorService:
    """``api`` is ready for an HTTP server; ``data_port`` is None if this process serves no chunks.

    ``certificate`` is used by API and data plane; None is plain HTTP. ``lock`` is held on the data directory if the
    database is embedded.
    """

    api: FastAPI
    requests: MirrorRequests
    room: RoomForSources
    controller: Controller
    data_port: int | None
    certificate: Certificate | None
    watch: Watch
    lock: DataLock | None
    metrics: Metrics


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
    """Build and start all parts of the mirror; close them when the block ends.

    Args:
        settings: from the environment.
        serve: open the data plane.
        work: run mirrors, collections and the scrub in this process.
        program: named in the error that a second mirror on this data directory gets.
        pause: waits before a request to an upstream is retried.
        clock: of this machine; decides when credentials and identity tokens expire. Rows are dated by the database's
            clock.
        stall: decides when the body of an upstream arrives too slowly.

    Raises:
        InvalidRequestError: a setting is invalid, its file cannot be used, or the store belongs to another database.
        InUseError: another process has the data directory or the data port.
    """
    check_binding(settings)
    await asyncio.to_thread(check_secret_files, settings)
    given = (settings.tls_cert, settings.tls_key) if serve else (None, None)
    shown = await asyncio.to_thread(certificate, "BDN_TLS", *given)
    authorities = await asyncio.to_thread(Authorities, settings.tls_ca)
    if serve and shown is None and not is_loopback(settings.host):
        logger.warning(
            "tokens and grants travel to and from %s in the clear: set BDN_TLS_CERT and BDN_TLS_KEY, unless a proxy encrypts them",
            settings.host,
        )
    async with AsyncExitStack() as stack:
        # Database and store, and the damage known in them.
        keyring = Keyring.parse(settings.secrets_key)
        with disk_errors(settings.data_dir):
            make_folder(settings.data_dir, is_durable=True)
        lock = stack.enter_context(locked(settings.data_dir, program)) if settings.is_embedded else None
        database = await open_database(stack, settings, clock)
        table, served = SecretTable(database, keyring), settings.served_organisations
        secrets = Secrets(OperatorSecrets(settings.secrets_dir), table, served)
        store = await stack.enter_async_context(opened_store(settings, exclusive=settings.is_embedded, clock=clock))
        await check_owner(settings, await OutageRetry(policy=_STARTING).ask(partial(database_id, database)), store)
        own = bucket_of(settings.effective_store)
        if settings.is_embedded and own is None:  # the deletions of the process before have ended with it
            async with database.write() as session:
                await (await session.connection()).run_sync(end_deletions)
        now, metrics, at_work = database.now, Metrics(database, store, shown), dict[str, CopyProgress]()
        signer = await asyncio.to_thread(load_grant_signer, settings)
        damages = Damages(database, store, now)

        # Upstreams: sign-in, requests and retries, and the number of requests to each host.
        issuer = await asyncio.to_thread(load_issuer, settings, clock)
        budgets = UpstreamBudgets(settings.transfers, pause=pause)
        metrics.registry.register(UpstreamMetrics(budgets))
        retries = UpstreamRetries(budgets, RetryPolicy(settings.outage_seconds))
        upstreams = settings.upstreams
        context = SourceContext(
            "",
            upstreams,
            ambient_credentials=settings.auth == "off",
            clock=clock,
            asker=retries,
        )
        sign_ins = SignIns(secrets, issuer, context)
        surveyor = Surveyor(database, sign_ins, settings.limit_files, settings.limit_bytes, store, own)

        # Retention: what leaves the store, and the events that say why.
        events = Events(database, settings.events_seconds, now)
        collector = Collector(database, store, settings.tombstone_seconds, now)
        operations = Operations(database)
        collections = Collections(
            database,
            operations,
            collector,
            settings.collect_grace_seconds,
            settings.collect_seconds,
            metrics.collected_bytes.inc,
            now,
        )

        room = RoomForSources(store)
        if work:
            expiring = repeated(events.expire, 600.0, "delete expired events")
            await stack.enter_async_context(in_background(expiring))
            pruning = repeated(partial(prune, database, settings.mirrors_seconds), 3600.0, "delete expired mirrors")
            await stack.enter_async_context(in_background(pruning))
            await stack.enter_async_context(in_background(collections.work()))

            # Ingest: upstream → store.
            connections = stack.enter_context(
                closing(ConnectionPool(timeout_seconds=_UPSTREAM_TIMEOUT_SECONDS, egress=settings.egress))
            )
            threads = stack.enter_context(closing(ByteThreads(settings.transfers, "copy")))
            reader = UpstreamReader(RangedReader(connections, stall=stall), threads, retries)
            ingest = Ingest(database, surveyor, Copier(store, reader), room)

            # Scrub: reads the store again, and repairs it from agents and upstreams.
            agents = ConnectionPool(timeout_seconds=_AGENT_TIMEOUT_SECONDS, authorities=authorities)
            to_agents = stack.enter_context(closing(agents))
            requires_tls = settings.tls_cert is not None  # also in a process that serves no chunks
            from_agents = AgentSource(database, to_agents, signer, now, requires_tls)
            on_repaired = metrics.repaired_chunks.inc
            repair = Repair(database, store, from_agents, ingest.restore, now, on_repaired)
            keeper = Keeper(
                database,
                damages,
                repair,
                settings.scrub_rate,
                metrics.scrubbed_bytes.inc,
                settings.scrub_seconds,
                now,
            )
            await stack.enter_async_context(in_background(keeper.keep()))

            worker = Worker(database, ingest, settings.jobs, metrics.transferred_bytes.inc, at_work)
            await stack.enter_async_context(worker.running())
            stack.callback(connections.close)  # runs first: a worker that ends does not wait for a silent upstream

        # Mirrors as their callers see them.
        hasty = replace(context, asker=retries.for_a_caller_who_waits())
        planner = replace(surveyor, sign_ins=replace(sign_ins, context=hasty))
        requests = MirrorRequests(database, planner, signer, settings.grant_seconds, at_work)

        # Data plane: store → agents, and jobs → store.
        tokens = TokenTable(database, now)
        token = settings.token if settings.auth == "token" else None
        clusters = await asyncio.to_thread(load_trusted_clusters, settings)
        accounts = await asyncio.to_thread(ServiceAccounts, clusters) if clusters else None
        if serve and accounts is not None:
            await stack.enter_async_context(in_background(accounts.keep()))
        access = Access(token, tokens, GrantVerifier(signer.public_keys), accounts)
        readers = ThreadPoolExecutor(_STORE_READERS, "store-read")
        stack.push_async_callback(asyncio.to_thread, readers.shutdown)
        chunks = StoreShelf(store, access, damages, asyncio.get_running_loop(), readers)
        pushes = Pushes(database, store, access, requests, readers, settings.limit_files, settings.limit_push_bytes)
        received = PushedChunks(pushes, asyncio.get_running_loop())
        archives = Archives(database, pushes)
        uses = ProjectUses(database, (active_jobs, active_pushes, mounted_caches))
        projects = Projects(database, uses)
        if work and settings.checkpoint_seconds:
            expire = partial(projects.expire, settings.checkpoint_seconds)
            await stack.enter_async_context(in_background(repeated(expire, 60.0, "delete expired checkpoints")))
        data_port: int | None = None
        buffers = ReceiveBuffers()
        if serve:
            pace = pacer(settings.upload_rate)
            server = ChunkServer(
                chunks,
                settings.host,
                settings.data_port,
                on_sent=metrics.served_bytes.inc,
                pace=pace,
                is_local=settings.auth == "off",
                certificate=shown,
                received=received,
                on_received=metrics.pushed_bytes.inc,
            )
            # In a thread: a worker of the server may be waiting for the event loop.
            stack.push_async_callback(asyncio.to_thread, server.close)
            server.start()
            data_port, buffers = server.port, server.buffers

        # Training jobs: from the request to the end of their ranks.
        caches, steps, logs = (
            TrainingCaches(database, signer, settings.cache_bytes),
            Steps(metrics.note_phase),
            Logs(database),
        )
        training_jobs = TrainingJobs(database, requests, projects, archives, steps, logs)
        runs = JobRuns(database, signer, settings.grant_seconds, table, caches, steps, logs)
        pods = await asyncio.to_thread(runners_of_pods, clusters, database, steps, runs, caches)
        controller = Controller(database, requests, projects, table, steps, pods)
        if work:
            await stack.enter_async_context(in_background(controller.run()))

        # API: what callers may request.
        eviction = StoreEviction(database, collector, settings.tombstone_seconds, now)
        asked = OperationRequests(database, operations, eviction, signer, settings.grant_seconds, now)
        located = store if isinstance(store, LocatableStore) and settings.store_delivery == "direct" else None
        locations = ChunkLocations(located, access, damages, clock, metrics.located_chunks.inc)
        heartbeats = Membership(database, asked, runs, events, now)
        await stack.enter_async_context(in_background(heartbeats.keep()))
        files = ServedFiles(database, store, signer, access.verifier, settings.presign_seconds, readers)
        hub_threads = ThreadPoolExecutor(_HUB_REQUESTS, "hub-gateway")
        stack.push_async_callback(asyncio.to_thread, hub_threads.shutdown, cancel_futures=True)
        forwarder = HubForwarder(upstreams, hub_threads)
        copies = GatewayCopies(requests, settings.gateway_organisation, settings.gateway_secret)
        await stack.enter_async_context(copies.running())
        gateway = HubGateway(GatewayRules.of(settings), forwarder, requests, copies, metrics.bypassing_tokens.inc)
        job_stages = JobStages(database)
        names = Names(database, store, settings.tombstone_seconds)
        services = (
            requests,
            asked,
            heartbeats,
            job_stages,
            events,
            collections,
            secrets,
            tokens,
            access,
            names,
            ContentsService(database, access, chunks, metrics, data_port, locations.delivery),
            locations,
            files,
            pushes,
            archives,
            projects,
            caches,
            ClientApi(training_jobs, projects, archives, caches, files, secrets, settings.public_url),
            training_jobs,
            runs,
            gateway,
            uses,
            metrics,
            *filter(None, [issuer]),
        )
        page = OperatorPage(
            Sources(
                Sessions(access, database, now),
                requests,
                heartbeats,
                names,
                events,
                damages,
                asked,
                job_stages,
                training_jobs,
                projects,
                database.watch,
                now,
            )
        )
        uploads = UploadEndpoint(archives, access.verifier, received, readers, metrics.pushed_bytes.inc, buffers)
        api = new_service(
            "BDN mirror",
            limit_request_bytes=settings.limit_request_bytes,
            authenticate=lambda head: access.identify(
                bearer_of(head.headers.get("authorization")), head.url.path, head.query_params.get("sig", "")
            ),
            routers=ROUTERS,
            provides=services,
            others={UPLOADS: uploads, PAGE: page},
        )
        yield MirrorService(api, requests, room, controller, data_port, shown, database.watch, lock, metrics)


def check_binding(settings: MirrorSettings) -> None:
    """Without authentication, a service must bind to loopback."""
    if settings.auth == "token" and not settings.token:
        raise InvalidRequestError("BDN_AUTH=token needs BDN_TOKEN, the token that callers must send")
    if settings.auth == "off" and not is_loopback(settings.host):
        raise InvalidRequestError(f"BDN_HOST={settings.host} is not loopback; set BDN_AUTH=token and BDN_TOKEN first")


def load_trusted_clusters(settings: MirrorSettings) -> dict[str, KubernetesCluster]:
    """The clusters of ``kubernetes``; none without it. Blocking. Raises ``InvalidRequestError``."""
    if settings.kubernetes is None:
        return {}
    if settings.auth == "off":
        raise InvalidRequestError(
            "BDN_KUBERNETES needs BDN_AUTH=token: with BDN_AUTH=off every caller is the operator, and no token is checked"
        )
    return load_clusters(settings.kubernetes)


def runners_of_pods(
    clusters: Mapping[str, KubernetesCluster], database: Database, steps: Steps, runs: JobRuns, caches: TrainingCaches
) -> list[Pods]:
    """Blocking. Raises ``InvalidRequestError`` if a file of authorities cannot be used."""
    found: list[Pods] = []
    for name, cluster in clusters.items():
        if (jobs := cluster.jobs) is not None:
            describer = Describer(name, cluster.audience, jobs, database, runs, caches)
            found.append(Pods(name, cluster, jobs, KubernetesApi(name, jobs), database, steps, runs, describer))
    return found


async def open_database(stack: AsyncExitStack, settings: MirrorSettings, clock: Callable[[], float]) -> Database:
    """The database at this version's schema. An embedded one is migrated here; another one must be migrated before."""
    database = Database(settings.effective_database_url, clock)
    stack.push_async_callback(database.close)
    if not settings.is_embedded:
        starting = OutageRetry(policy=_STARTING)
        await starting.ask(database.check_version)
        await starting.ask(database.set_clock)
        await stack.enter_async_context(in_background(database.keep_clock()))
        return database
    await database.migrate()
    async with database.write() as session:
        await mirrors.release_claims(session)
        await training.release_claims(session)
    return database


async def adopt_store(settings: MirrorSettings) -> tuple[str | None, str]:
    """Make the settings' database the owner of their store. Returns the previous and the new owner.

    Raises ``InUseError`` if a mirror holds the embedded database, and so the store.
    """
    async with AsyncExitStack() as stack:
        if settings.is_embedded:
            with disk_errors(settings.data_dir):
                make_folder(settings.data_dir, is_durable=True)
            stack.enter_context(locked(settings.data_dir, "bdn-admin store adopt"))
        own = await database_id(await open_database(stack, settings, time.time))
        store = await stack.enter_async_context(opened_store(settings, exclusive=False))
        before = await asyncio.to_thread(store.owner)
        if before != own:
            await asyncio.to_thread(partial(store.owner, own, replace=True))
        return before, own
