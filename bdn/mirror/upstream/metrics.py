"""What the mirror does to its upstreams, in numbers for Prometheus. Hosts are not named: there may be thousands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from bdn.core.pace.limit import Outcome
from bdn.mirror.upstream.budgets import UpstreamBudgets

_NAMES: Final = {
    Outcome.ARRIVED: "arrived",
    Outcome.ANSWERED: "answered",
    Outcome.FAILED: "failed",
    Outcome.REFUSED: "refused",
}


class UpstreamMetrics(Collector):
    """Reads the budgets when it is asked, so that a request pays nothing for being counted."""

    def __init__(self, budgets: UpstreamBudgets) -> None:
        self._budgets = budgets

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families; counters get their ``_total`` from the library."""
        totals, budgets = self._budgets.totals, self._budgets.now()
        requests = CounterMetricFamily(
            "bdn_upstream_requests", "Requests to upstreams, by how they ended", labels=["outcome"]
        )
        for outcome, name in _NAMES.items():
            requests.add_metric([name], totals.requests[outcome])
        yield requests
        yield CounterMetricFamily("bdn_upstream_retries", "Failed requests that were made again", totals.retries)
        yield CounterMetricFamily("bdn_upstream_pauses", "Waits because a host asked for them", totals.pauses)
        yield CounterMetricFamily("bdn_upstream_pause_seconds", "Seconds of these waits", totals.pause_seconds)
        yield GaugeMetricFamily(
            "bdn_upstream_limit",
            "Requests that may be in flight, over all hosts",
            sum(budget.limit for budget in budgets),
        )
        yield GaugeMetricFamily(
            "bdn_upstream_slots", "Threads and tasks that ask upstreams now", sum(budget.slots for budget in budgets)
        )
        yield GaugeMetricFamily("bdn_upstream_hosts_closed", "Hosts that asked to wait", self._budgets.closed())
