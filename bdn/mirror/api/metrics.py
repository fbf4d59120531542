"""Readiness, and the mirror's metrics for Prometheus: read from the database on request, or counted by this process.

Both are served without authentication: orchestrators have no tokens. Names: one prefix, base units, low-cardinality
labels. Source: prometheus.io, "Metric and label naming".
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

import bdn
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import MirrorStore
from bdn.core.training.states import Status
from bdn.mirror.db import agents, chunks, damaged, mirrors, operations, training
from bdn.mirror.db.database import Database
from bdn.mirror.db.waiting import SharedRead, ThreadRead
from bdn.net.tls import Certificate

PROBE_SECONDS = 5.0
_PHASES: Final = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 6 * 3600, 86400)  # seconds
_SUMMED_PER_SECOND: Final = 50_000  # chunks: the sum over a million is read again after 20 s


class Metrics:
    """Counters that parts increment, and gauges that ``render`` sets."""

    def __init__(self, database: Database, store: MirrorStore, certificate: Certificate | None = None) -> None:
        self._database = database
        self._check, self._count_evidence = ThreadRead(store.check), ThreadRead(store.evidence)
        self._shared = SharedRead(self._read, 0.0)
        self._totals = 0, 0
        self._totals_until = 0.0
        # Else each counter has a second series, ``_created``, that no query needs and promtool rejects.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.transferred_bytes = counter("bdn_mirror_transferred_bytes", "Bytes read from upstreams")
        self.served_bytes = counter("bdn_mirror_served_bytes", "Bytes served by the data plane")
        self.pushed_bytes = counter("bdn_mirror_pushed_bytes", "Bytes of chunks received in pushes")
        self.located_chunks = counter(
            "bdn_mirror_located_chunks", "Signed addresses in the store's bucket issued to agents"
        )
        self.bypassing_tokens = counter(
            "bdn_mirror_bypassing_tokens",
            "Tokens for the hub's xet storage, passed to clients that listed a commit at the hub",
        )
        self.served_manifests = counter("bdn_mirror_served_manifests", "Roots of manifests served")
        self.scrubbed_bytes = counter("bdn_mirror_scrubbed_bytes", "Bytes of the store read again to verify them")
        self.repaired_chunks = counter("bdn_mirror_repaired_chunks", "Damaged chunks repaired in the store")
        self._damaged = gauge("bdn_mirror_damaged_chunks", "Chunks that are damaged or missing in the store")
        self._evidence = gauge("bdn_mirror_evidence_chunks", "Wrong chunks kept as evidence")
        self._scrubbed_at = gauge(
            "bdn_mirror_scrub_round_timestamp_seconds", "When the last complete scrub of the store ended"
        )
        self.collected_bytes = counter("bdn_mirror_collected_bytes", "Bytes that collections deleted from the store")
        self._given_up = gauge("bdn_mirror_restorable_manifests", "Evicted manifests that can still be restored")
        self._mirrors = gauge("bdn_mirror_mirrors", "Mirrors by status", ["status"])
        self._chunks = gauge("bdn_mirror_chunks", "Chunks in the store")
        self._stored = gauge("bdn_mirror_stored_bytes", "Bytes of these chunks")
        self._quarantined = gauge("bdn_mirror_quarantined_files", "Files that upstreams sent with wrong content")
        self._collected_at = gauge(
            "bdn_mirror_collection_timestamp_seconds", "When the last complete collection of the store ended"
        )
        self._agents = gauge("bdn_mirror_agents_alive", "Agents with a recent heartbeat")
        self._silent = gauge("bdn_mirror_agents_silent", "Agents without a recent heartbeat that did not leave")
        self._database_up = gauge("bdn_mirror_database_up", "1 if the database answers, else 0")
        expiry = gauge(
            "bdn_mirror_certificate_expiry_timestamp_seconds", "When the TLS certificate in use expires; 0: plain HTTP"
        )
        expiry.set_function(lambda: 0 if certificate is None else certificate.expires_at)
        self._jobs = gauge("bdn_training_jobs", "Training jobs by status", ["status"])
        self._phases = Histogram(
            "bdn_training_phase_seconds",
            "Seconds that training jobs were in a status",
            ["phase"],
            buckets=_PHASES,
            registry=self.registry,
        )
        info = gauge("bdn_mirror_build_info", "The running version", ["version"])
        info.labels(bdn.__version__).set(1)

    def note_phase(self, status: str, seconds: float) -> None:
        self._phases.labels(status).observe(max(0.0, seconds))

    async def render(self) -> bytes:
        """The exposition text.

        The route is not authenticated, so concurrent callers share one answer. The sum over all chunks is a little old.
        """
        return await self._shared.get()

    async def _read(self) -> bytes:
        try:
            async with _in_time("the database"):
                await self._database.check_version()
            await self._count_rows()
            self._database_up.set(1)
        except StoreUnavailableError:  # reported all the same; gauges of the database stay as they were
            self._database_up.set(0)
        with suppress(StoreUnavailableError):  # the metrics of the database and this process are reported all the same
            async with _in_time("the store"):
                self._evidence.set(await self._count_evidence.get())
        return generate_latest(self.registry)

    async def _count_rows(self) -> None:
        async with self._database.read() as session:
            by_status = await mirrors.count_by_status(session)
            if time.monotonic() >= self._totals_until:
                self._totals = await chunks.of(session, chunks.totals)
                self._totals_until = time.monotonic() + self._totals[0] / _SUMMED_PER_SECOND
            quarantined = await damaged.count_wrong_files(session)
            alive = await agents.count_alive(session, self._database.now())
            silent = await agents.count_silent(session, self._database.now())
            collected = await operations.last_completed_collection(session)
            wrong = await damaged.count(session)
            newest = await damaged.scrub_state(session)
            given_up = await mirrors.count_restorable(session)
            jobs = await training.count_by_status(session)
        for status in ("PENDING", "SYNCING", "READY", "FAILED", "CANCELED"):
            self._mirrors.labels(status).set(by_status.get(status, 0))
        for job_status in get_args(Status):
            self._jobs.labels(job_status).set(jobs.get(job_status, 0))
        self._chunks.set(self._totals[0])
        self._stored.set(self._totals[1])
        self._quarantined.set(quarantined)
        self._damaged.set(wrong)
        self._scrubbed_at.set((newest and newest.completed_at) or 0)
        self._given_up.set(given_up)
        self._agents.set(alive)
        self._silent.set(silent)
        self._collected_at.set(collected or 0)

    async def check_ready(self) -> None:
        """Raise ``StoreUnavailableError`` if the database or the store does not answer in time; it says which."""
        async with _in_time("the database"):
            await self._database.check_version()
        self._database.check_writable(PROBE_SECONDS)
        async with _in_time("the store"):
            await self._check.get()


@asynccontextmanager
async def _in_time(what: str) -> AsyncIterator[None]:
    """Limit a check: behind a broken network nothing answers, and an orchestrator without an answer learns nothing."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            yield
    except TimeoutError:
        raise StoreUnavailableError(f"{what} has not answered for {PROBE_SECONDS:g} s") from None
