"""The mirror's numbers for Prometheus, read from the database when they are asked for, plus what only the process knows.

Names: one prefix, base units, low-cardinality labels. Source: prometheus.io, "Metric and label naming".
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

import bdn
from bdn.mirror.cluster.liveness import is_alive
from bdn.mirror.database import Database
from bdn.mirror.repository import agents, contents, mirrors, quarantine


class Metrics:
    """Counters that parts increment, and gauges that ``render`` reads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.registry = CollectorRegistry()
        self.transferred_bytes = Counter(
            "bdn_mirror_transferred_bytes", "Bytes read from upstreams", registry=self.registry
        )
        self.served_bytes = Counter("bdn_mirror_served_bytes", "Bytes served by the data plane", registry=self.registry)
        self._mirrors = Gauge("bdn_mirror_mirrors", "Mirrors by status", ["status"], registry=self.registry)
        self._contents = Gauge("bdn_mirror_contents", "Distinct files in the store", registry=self.registry)
        self._stored = Gauge("bdn_mirror_stored_bytes", "Bytes of distinct files in the store", registry=self.registry)
        self._quarantined = Gauge(
            "bdn_mirror_quarantined_files", "Files that came with the wrong content", registry=self.registry
        )
        self._agents = Gauge("bdn_mirror_agents_alive", "Agents with a recent heartbeat", registry=self.registry)
        info = Gauge("bdn_mirror_build_info", "The running version", ["version"], registry=self.registry)
        info.labels(bdn.__version__).set(1)

    async def render(self) -> bytes:
        """The exposition text."""
        async with self._database.read() as session:
            by_status = await mirrors.count_by_status(session)
            count, size = await contents.totals(session)
            quarantined = await quarantine.count(session)
            rows = await agents.all_agents(session)
        for status in ("PENDING", "SYNCING", "READY", "FAILED", "CANCELED"):
            self._mirrors.labels(status).set(by_status.get(status, 0))
        self._contents.set(count)
        self._stored.set(size)
        self._quarantined.set(quarantined)
        self._agents.set(sum(is_alive(row, time.time()) for row in rows))
        return generate_latest(self.registry)
