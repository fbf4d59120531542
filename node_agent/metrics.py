"""Prometheus metrics of the agent: cache, fills and failures."""

from collections.abc import Callable, Mapping
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

from bdn import __version__
from bdn.wire.location_schema import Delivery
from bdn.wire.operation_schema import Outcome, Tier
from bdn.wire.stage_schema import StageState, TierUse
from node_agent.stage.stage import StageRegistry

_STATES: Final[tuple[StageState, ...]] = ("PENDING", "STAGING", "READY", "FAILED", "RELEASED")
_USES: Final = {
    "budget": "Bytes that the tier may hold",
    "committed": "Bytes of complete content",
    "reserved": "Bytes reserved for fills",
    "leased": "Bytes that stages lease",
    "pressed": "Bytes held beyond what other data on the disk leaves to the cache",
}
_READY_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class AgentMetrics:
    def __init__(self, stages: StageRegistry) -> None:
        # Else each counter has a second series, ``_created``, that no query needs and promtool rejects.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._stages = stages
        count = partial(Counter, registry=self.registry)
        self.fill_bytes = count(
            "bdn_agent_fill_bytes", "Bytes that fills obtained, by the tier they came from", ["tier"]
        )
        self.served_bytes = count("bdn_agent_served_bytes", "Bytes served to peers")
        self.gateway_bytes = count("bdn_agent_gateway_bytes", "Bytes of files sent to clients of the hub gateway")
        self.gateway_answers = count("bdn_agent_gateway_answers", "Answers of the hub gateway, by status", ["status"])
        self.evictions = count("bdn_agent_evictions", "Manifests evicted, by reason", ["reason"])
        self.cluster_evictions = count(
            "bdn_agent_cluster_evictions", "Manifests evicted from the cluster tier, by reason", ["reason"]
        )
        self.obtained_chunks = count(
            "bdn_agent_obtained_chunks", "Chunks read from the mirror at the request of a peer"
        )
        self.obtained_bytes = count("bdn_agent_obtained_bytes", "Bytes of these chunks")
        self.documents = count(
            "bdn_agent_documents", "Roots and pages of manifests obtained, by the tier they came from", ["tier"]
        )
        self.lost_events = count(
            "bdn_agent_lost_events", "Events not written to the journal, because the disk is full or broken"
        )
        self.origin_bytes = count(
            "bdn_agent_origin_bytes",
            "Bytes of chunks that came from no peer: straight from the bucket of the mirror's store, or through the mirror",
            ["delivery"],
        )
        self.proxied_chunks = count(
            "bdn_agent_proxied_chunks",
            "Chunks requested from the mirror's data plane although it delivers from its bucket, by reason",
            ["reason"],
        )
        self.mismatches = count("bdn_agent_verification_failures", "Chunks that arrived with the wrong content")
        self.scrubbed_bytes = count(
            "bdn_agent_scrubbed_bytes", "Bytes read again and compared with their names", ["tier"]
        )
        self.damaged_chunks = count(
            "bdn_agent_damaged_chunks",
            "Chunks on this disk that were wrong, by what became of them",
            ["tier", "outcome"],
        )
        for tier in ("node", "cluster"):  # from 0: an increase from nothing to 1 is none to Prometheus
            for outcome in get_args(Outcome):
                self.damaged_chunks.labels(tier, outcome)
        self.lost_files = count("bdn_agent_lost_files", "Whole files that were wrong and could not be repaired")
        gauge = partial(Gauge, registry=self.registry)
        self._states = gauge("bdn_agent_stages", "Stages, by state", ["state"])
        self._uses = {name: gauge(f"bdn_agent_cache_{name}_bytes", what, ["tier"]) for name, what in _USES.items()}
        gauge("bdn_agent_build_info", "The running version", ["version"]).labels(__version__).set(1)
        self.ready_seconds = Histogram(
            "bdn_agent_ready_seconds",
            "Seconds from the request of a stage to READY",
            buckets=_READY_BUCKETS,
            registry=self.registry,
        )

    def filled(self, tier: Tier, size: int) -> None:
        self.fill_bytes.labels(tier).inc(size)

    def evicted(self, tier: Tier, reason: str, manifests: int) -> None:
        (self.cluster_evictions if tier == "cluster" else self.evictions).labels(reason).inc(manifests)

    def obtained(self, size: int) -> None:
        """Count a chunk that was read from the mirror for a peer."""
        self.obtained_chunks.inc()
        self.obtained_bytes.inc(size)

    def received(self, delivery: Delivery, size: int) -> None:
        """Count bytes of a chunk from the mirror's bucket or the mirror itself."""
        self.origin_bytes.labels(delivery).inc(size)

    def proxied(self, reason: str) -> None:
        """Count a chunk requested from the mirror instead of its bucket."""
        self.proxied_chunks.labels(reason).inc()

    def documented(self, tier: str) -> None:
        """Count a root or page of a manifest."""
        self.documents.labels(tier).inc()

    def watch(self, name: str, what: str, read: Callable[[], float], **labels: str) -> None:
        """Register a gauge whose value is read at each scrape."""
        gauge = Gauge(name, what, list(labels), registry=self.registry)
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def render(self, tiers: Mapping[str, TierUse]) -> bytes:
        counts = self._stages.count_by_state()
        for state in _STATES:
            self._states.labels(state).set(counts[state])
        for name, figure in self._uses.items():
            for tier, use in tiers.items():
                figure.labels(tier).set(getattr(use, name))
        return generate_latest(self.registry)
