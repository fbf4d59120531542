"""Constructs the agent: ``open_agent`` reads top to bottom, from the disk to the mirror."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Final

from bdn import __version__
from bdn.core.events import Event
from bdn.core.pace.retry import RetryPolicy
from bdn.disk.direct import DirectWrites
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, Certificate, certificate
from bdn.transfer.byte_threads import BufferPool, ByteThreads, pacer
from bdn.transfer.fair_limit import FairLimit
from bdn.wire.heartbeat_schema import Heartbeat
from bdn.wire.http_fields import is_in_the_clear, is_loopback
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.kubelet_disk import kubelet_place, warn_of_kubelet
from node_agent.cache.node_cache import Clock, NodeCache
from node_agent.cache.quarantine import Quarantine
from node_agent.cache.space import check_fitness
from node_agent.cache.tiers import open_tiers
from node_agent.disk.cache_directory import boot_id, open_cache_directory
from node_agent.disk.places import Places
from node_agent.disk.trash import Trash
from node_agent.fetch.bandwidth import Bandwidth, OrderedLimit
from node_agent.fetch.bucket_reader import MirrorBucket
from node_agent.fetch.chain import ReaderChain, owner_policy
from node_agent.fetch.chunk_lists import ChunkLists
from node_agent.fetch.documents import Catalogue, PeerRoots
from node_agent.fetch.locations import LocationLookup, asking
from node_agent.fetch.owner import Owner
from node_agent.fetch.peers import Members, Peers, Waits
from node_agent.fill.fills import Fills
from node_agent.fill.provision import Pools, Provision
from node_agent.job.cache_volume import CacheVolume
from node_agent.job.shared_caches import SharedCaches
from node_agent.job.volumes import JobVolumes, open_volumes
from node_agent.journal import Journal
from node_agent.metrics import AgentMetrics
from node_agent.mirror_link.commands import CommandInbox, EvictionCommands, PrefetchCommands, VerificationCommands
from node_agent.mirror_link.heartbeats import AgentHoldings, ChangeSignal, Heartbeats
from node_agent.run.runs import Runs, open_runs
from node_agent.scrub.reading import ScrubReader
from node_agent.scrub.repair import FileRepair, FilesOfStages, RepairGrants, RepairSource
from node_agent.scrub.scrubber import Rounds, Scrubber, ScrubRecord
from node_agent.settings import AgentSettings
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.records import StageRecords
from node_agent.stage.stage import StageRegistry
from node_agent.stage.stage_reports import stage_reports
from node_agent.stage.stages import StageService
from node_agent.stage.view.exposure import choose
from node_agent.stage.view.views import Views
from node_agent.stage.warm import StagesFirst, Warmer
from node_agent.trust import Trust

_READ_TIMEOUT_SECONDS: Final = 20.0
_PEER_TIMEOUT_SECONDS: Final = 2.0  # to connect; the ring decides how long an answer may take
_LEAST_THREADS: Final = 4  # minimum of receiving threads, at any throughput
_PAGE_THREADS: Final = 4
_SCRUB_BUFFERS: Final = 4  # of 8 MiB: one reads, one repairs and reads back, the others serve requests meanwhile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agent:
    settings: AgentSettings
    client: MirrorClient
    places: Places
    cache: NodeCache
    journal: Journal
    stages: StageService
    pulls: Pulls
    volumes: JobVolumes
    evictions: EvictionCommands
    holdings: AgentHoldings
    housekeeping: Housekeeping
    scrub: Rounds
    verifications: VerificationCommands
    caches: SharedCaches
    heartbeats: Heartbeats
    trust: Trust
    metrics: AgentMetrics
    data_port: int
    certificate: Certificate | None  # of the ports; None is plain HTTP

    async def check_ready(self) -> None:
        """Raises ``DiskFailedError`` if the disk cannot take new stages."""
        await in_thread(check_fitness, self.places.root)

    async def events(self, mention: str, limit: int) -> list[Event]:
        """Events of this node, newest first; ``mention`` selects events whose lines contain the text."""
        found = await in_thread(lambda: list(islice(self.journal.events(mention), limit)))
        return [replace(one, cluster=self.settings.cluster, node=self.settings.node) for one in found]


@asynccontextmanager
async def open_agent(
    settings: AgentSettings,
    *,
    clock: Clock = time.time,
    elapsed: Clock = time.monotonic,
    policy: RetryPolicy | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[Agent]:
    """A running agent: its disk is scanned and its stages resumed. Leaving the context drains it; stages survive.

    ``clock`` is the time of day; ``elapsed`` is monotonic and measures leases and response times, bounded by
    ``waits``.

    Raises:
        SettingsError: the settings contradict each other.
        InvalidRequestError: the cache directory has an unknown format, or TLS files cannot be used.
        InUseError: another agent uses the cache directory, or another program the data port.
        DiskFailedError: the cache directory cannot be used.
    """
    settings.check()
    shown = await in_thread(certificate, "BDN_AGENT_TLS", settings.tls_cert, settings.tls_key)
    authorities = await in_thread(Authorities, settings.tls_ca)
    _warn_of_plain_http(settings)
    policy, waits = policy or RetryPolicy(settings.outage_seconds), waits or Waits()
    async with AsyncExitStack() as stack:
        registry, news = StageRegistry(), ChangeSignal()
        metrics = AgentMetrics(registry)

        # Disk and cache: load the state of the last run.
        disk = await open_cache_directory(stack, Places(settings.effective_cache_dir, settings.mounts_dir))
        places = disk.places
        await in_thread(warn_of_kubelet, settings, places.root, kubelet_place())
        journal = Journal(places.journal, clock, metrics.lost_events.inc)
        stack.callback(journal.close)
        await in_thread(journal.open)
        trust = Trust(places.trusted_keys, clock, news.tell_now)
        members = Members(settings.node, places.members, requires_tls=settings.tls == "require")
        await in_thread(trust.load)
        await in_thread(members.load)
        tiers = await open_tiers(
            settings,
            disk,
            journal,
            on_evicted=metrics.evicted,
            verify=trust.verify,
            on_change=news.tell,
            clock=clock,
        )
        manifests = tiers.node.files.records

        # Fetch: chunks from peers and the mirror.
        client = await stack.enter_async_context(
            MirrorClient(settings.url, settings.token, token_file=settings.token_file, authorities=authorities)
        )
        to_mirror = ConnectionPool(timeout_seconds=_READ_TIMEOUT_SECONDS, authorities=authorities)
        to_peers = ConnectionPool(timeout_seconds=_PEER_TIMEOUT_SECONDS, authorities=authorities)
        peers = Peers(members, settings.byte_threads, elapsed)
        mismatched = metrics.mismatches.inc
        to_bucket = ConnectionPool(timeout_seconds=_READ_TIMEOUT_SECONDS)
        asks = asking(client, asyncio.get_running_loop())
        locations = LocationLookup(asks, elapsed, requires_tls=settings.tls == "require")
        most = 2 * settings.byte_threads  # for this node's fills, and for its peers
        bucket = MirrorBucket(locations, to_bucket, most, elapsed, metrics.proxied)
        chain = ReaderChain(
            settings.url,
            to_mirror,
            to_peers,
            tiers.node.chunks,
            peers,
            policy,
            waits,
            bucket,
            mismatched,
            metrics.received,
        )
        reading = ByteThreads(_PAGE_THREADS, "agent-pages")
        stack.push_async_callback(in_thread, reading.close)
        catalogue = Catalogue(
            manifests,
            client,
            PeerRoots(peers, authorities),
            chain,
            reading,
            policy,
            waits.document_seconds,
            metrics.documented,
        )
        bandwidth = Bandwidth(settings.download_rate, settings.prefetch_rate)

        # Fill: files from chunks, in byte threads.
        pools = Pools(
            ByteThreads(settings.byte_threads, "agent-bytes", least=_LEAST_THREADS),
            ByteThreads(settings.byte_threads, "agent-peers"),
            OrderedLimit(settings.byte_threads),
        )
        stack.push_async_callback(in_thread, pools.own.close)
        stack.push_async_callback(in_thread, pools.peers.close)
        fills = Fills(await stack.enter_async_context(BackgroundTasks()))
        provision = Provision(catalogue, disk, tiers.node, fills, chain, pools, bandwidth, metrics.filled)

        # Serve: chunks for peers; chunks that this agent owns are fetched for them.
        serving = ByteThreads(settings.byte_threads, "agent-serving")
        stack.push_async_callback(in_thread, serving.close)
        owner = Owner(
            loop=asyncio.get_running_loop(),
            background=await stack.enter_async_context(BackgroundTasks()),
            threads=serving,
            places=FairLimit(settings.byte_threads),
            origin=pools.origin,
            bandwidth=bandwidth,
            lists=ChunkLists(replace(catalogue, policy=owner_policy(policy))),
            access=tiers.access,
            chain=chain,
            on_obtained=metrics.obtained,
        )
        served = owner if "cluster" in settings.roles else tiers.access
        server = ChunkServer(
            served,
            settings.host,
            settings.data_port,
            on_sent=metrics.served_bytes.inc,
            pace=pacer(settings.upload_rate),
            is_local=settings.auth == "off",
            certificate=shown,
        )
        stack.push_async_callback(in_thread, server.close)

        # Scrub: verify and repair the disk.
        views = Views(disk.files, await in_thread(choose, settings.exposure, places))
        buffers, stop_scrub = BufferPool(_SCRUB_BUFFERS), threading.Event()
        scrub_record = ScrubRecord(places.scrub, tiers.suspects, clock())
        await in_thread(scrub_record.load)
        staged, quarantine = FilesOfStages(registry, views, manifests), Quarantine(places.quarantine)
        grants = RepairGrants(registry, trust, is_open=settings.auth == "off")
        scrubber = Scrubber(
            tiers.node,
            ScrubReader(buffers, quarantine, metrics, clock),
            FileRepair(disk.files, quarantine, staged),
            RepairSource(provision, grants, lru_cache(1)(manifests.load_layout), buffers, stop_scrub),
            scrub_record,
            registry,
            settings.cluster,
            settings.node,
        )
        rounds = Rounds(
            scrubber, scrub_record, StagesFirst(registry, settings.scrub_rate), settings.scrub_seconds, clock
        )

        # Stage: files appear for jobs.
        stage_tasks = await stack.enter_async_context(BackgroundTasks())
        warmer = Warmer(stage_tasks, views, StagesFirst(registry, settings.warm_rate))
        lifecycle = Lifecycle(
            registry,
            stage_tasks,
            provision,
            warmer,
            views,
            StageRecords(places),
            clock,
            elapsed,
            on_ready=metrics.ready_seconds.observe,
            settle=scrubber.settle,
        )
        housekeeping = Housekeeping(lifecycle, disk.is_rebooted)

        # Training caches: directories of jobs on a volume that the cluster shares.
        volume_root = settings.effective_volume_root
        volume = CacheVolume(volume_root, stack.enter_context(Trash(volume_root / ".trash")))
        caches = stack.enter_context(
            SharedCaches(
                volume,
                settings.cluster,
                client,
                trust.check_cache,
                elapsed=elapsed,
                clock=clock,
                report=news.tell_now,
                on_release=news.wake,
            )
        )

        # Job volumes: directories that jobs write; their space is reserved before stages reserve any.
        prefetches = PrefetchCommands(provision, tiers.node, trust, news.wake)
        volumes = await open_volumes(
            stack,
            settings,
            tiers.node,
            views.kind,
            pool=to_mirror,
            authorities=authorities,
            outages=OutageRetry(policy=policy),
            verify=trust.check_push,
            until_idle=registry.until_idle,
            keep=prefetches.keep,
            caches=caches,
            clock=clock,
        )

        # Runs: the ranks of training jobs on this node.
        stages = StageService(registry, lifecycle, trust.check, is_node="node" in settings.roles)
        runs = await open_runs(stack, settings, client=client, volumes=volumes, stages=stages, news=news)

        # Mirror link: reports to the mirror and commands from it.
        verifications = VerificationCommands(scrubber, staged)
        holdings = AgentHoldings(tiers.node, settings.roles, registry, disk.writes)
        evictions = EvictionCommands(settings.cluster, settings.node, lifecycle, prefetches.cancel)
        heartbeats = Heartbeats(
            _identity(settings, server.port, runs),
            client,
            trust=trust,
            members=members,
            holdings=holdings,
            inbox=CommandInbox(
                stage_tasks,
                {
                    "evict": evictions.run,
                    "prefetch": prefetches.run,
                    "verify": verifications.run,
                    "remove_cache": caches.run,
                    **({} if runs is None else {"run": runs.run}),
                },
                news.wake,
                lambda report: None if runs is None else runs.delivered(report),
            ),
            news=news,
            journal=journal,
            state=lambda: {**volumes.state(), "stages": stage_reports(registry, clock())},
        )

        _watch(
            metrics,
            writes=disk.writes,
            journal=journal,
            pools=pools,
            bucket=bucket,
            volumes=volumes,
            scrubbed=scrub_record,
            certificate=shown,
        )
        metrics.watch(
            "bdn_agent_cluster_owners",
            "Agents that own chunks of this agent's cluster, as the mirror last reported them",
            lambda: len(members.current().members),
            cluster=settings.cluster,
        )

        # Start: stages first, then peers, then the mirror; stop in reverse order. Stop first the threads that wait for
        # the network or copy, so that the shutdown does not wait for them.
        def stop_waiting() -> None:
            for stage in registry.all():
                stage.stop.set()
            fills.stop_trying()
            to_mirror.close()
            to_peers.close()
            to_bucket.close()

        stack.callback(stop_waiting)
        await housekeeping.resume()
        if runs is not None:
            await runs.resume()
        server.start()
        stack.push_async_callback(heartbeats.leave)
        background = await stack.enter_async_context(BackgroundTasks())
        stack.callback(stop_scrub.set)
        stack.callback(caches.stop_walking)
        heartbeats.start(background)
        background.start(housekeeping.run(), "housekeeping")
        background.start(rounds.run(), "scrub")
        background.start(caches.keep(), "training caches")
        yield Agent(
            settings=settings,
            client=client,
            places=places,
            cache=tiers.node,
            journal=journal,
            stages=stages,
            pulls=Pulls(stages),
            volumes=volumes,
            evictions=evictions,
            holdings=holdings,
            housekeeping=housekeeping,
            scrub=rounds,
            verifications=verifications,
            caches=caches,
            heartbeats=heartbeats,
            trust=trust,
            metrics=metrics,
            data_port=server.port,
            certificate=shown,
        )


def _watch(
    metrics: AgentMetrics,
    *,
    writes: DirectWrites,
    journal: Journal,
    pools: Pools,
    bucket: MirrorBucket,
    volumes: JobVolumes,
    scrubbed: ScrubRecord,
    certificate: Certificate | None,
) -> None:
    figures: dict[str, tuple[str, Callable[[], float]]] = {
        "direct_writes": ("1 when files are written past the page cache", lambda: writes.are_direct),
        "events_waiting": ("Events not yet reported to the mirror", lambda: journal.waiting),
        "byte_threads": ("Threads that may move bytes at once now", lambda: pools.own.limit),
        "bucket_requests": ("Requests that may be in flight to the mirror's bucket now", lambda: bucket.limit),
        "job_volume_bytes": ("Bytes reserved for job volumes", lambda: volumes.space.aside.promised),
        "unsynced_bytes": (
            "Bytes of checkpoints in job volumes that the mirror does not have",
            lambda: volumes.unsynced_bytes,
        ),
        "scrub_round_timestamp_seconds": (
            "End of the last complete scrub round, in seconds since the epoch; 0: none yet",
            lambda: scrubbed.round.ended or 0,
        ),
        "certificate_expiry_timestamp_seconds": (
            "When the TLS certificate in use expires; 0: plain HTTP",
            lambda: 0 if certificate is None else certificate.expires_at,
        ),
    }
    for name, (what, read) in figures.items():
        metrics.watch(f"bdn_agent_{name}", what, read)


def _warn_of_plain_http(settings: AgentSettings) -> None:
    if settings.tls_cert is None and not is_loopback(settings.host):
        logger.warning(
            "peers send their grants to %s in the clear: set BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY", settings.host
        )
    if is_in_the_clear(settings.url):
        logger.warning("this agent's token and grants go to %s in the clear: use a mirror with TLS", settings.url)


def _identity(settings: AgentSettings, data_port: int, runs: Runs | None) -> Heartbeat:
    advertise = settings.advertised(data_port)
    if advertise is None and "cluster" in settings.roles:
        logger.warning(
            "peers on other machines cannot reach the data plane on %s, so this agent owns no chunks of its cluster: "
            "set BDN_AGENT_HOST or BDN_AGENT_ADVERTISE",
            settings.host,
        )
    return Heartbeat(
        node=settings.node,
        cluster=settings.cluster,
        boot_id=boot_id(),
        roles=list(settings.roles),
        advertise=advertise,
        version=__version__,
        tiers={},
        capacity=None if runs is None else runs.capacity,
    )
