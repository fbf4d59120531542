"""Links of a simulated cluster: how long chunks take from one machine to another.

Two models with the same face. ``QueuedLinks`` costs one event for each chunk and carries a thousand nodes; ``FluidLinks`` is exact
and slow: all flows share all links at every moment as fairly as it is possible (max-min). A test holds the one against the other.
Machines are numbers; ``MIRROR`` is one of them. Rates are bytes per second.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

MIRROR = -1
Flow = tuple[int, int, int]  # to whom, which chunk, from whom


class Links(Protocol):
    def send(self, now: float, flow: Flow, size: int) -> float | None:
        """Begin; the time of arrival, where it is known now. Otherwise ``arrived`` will tell."""
        ...

    def cancel(self, now: float, source: int, size: int) -> None:
        """The last ``size`` bytes of a flow from there are not wanted any more."""
        ...

    def next_tick(self, now: float) -> float | None:
        """When to ask ``arrived``, unless something begins before."""
        ...

    def arrived(self, now: float) -> list[tuple[float, Flow]]:
        """What has come through, and when."""
        ...


class QueuedLinks:
    """A node's links serve chunk after chunk, first come first served, at their full rate; the mirror's uplink is shared fairly.

    A chunk is in the air on both links at once. What peers send to a busy downlink waits in the network, so that nobody's uplink
    waits for another's downlink; what trickles in from the mirror takes its fair share of the downlink from the beginning.
    """

    def __init__(self, mirror_rate: float, rates: list[float]) -> None:
        self._seconds_per_byte = [1 / rate for rate in rates]
        self._up_free = [0.0] * len(rates)
        self._down_free = [0.0] * len(rates)
        self._mirror_rate = mirror_rate
        self._served = 0.0  # bytes that a flow which began at the beginning would have got from the mirror
        self._at = 0.0
        self._flows: list[tuple[float, Flow, int, float]] = []  # by what ``served`` will be when they are through

    def send(self, now: float, flow: Flow, size: int) -> float | None:
        target, _, source = flow
        if source == MIRROR:
            self._advance(now)
            heappush(self._flows, (self._served + size, flow, size, now))
            return None
        begins = self._up_free[source]
        through = (max(now, begins)) + size * self._seconds_per_byte[source]
        self._up_free[source] = through
        return self._land(through, target, size)

    def next_tick(self, now: float) -> float | None:
        self._advance(now)
        if not self._flows:
            return None
        return now + max(0.0, self._flows[0][0] - self._served) * len(self._flows) / self._mirror_rate

    def arrived(self, now: float) -> list[tuple[float, Flow]]:
        self._advance(now)
        through = []
        while self._flows and self._flows[0][0] <= self._served + 1e-3:
            _, flow, size, began = heappop(self._flows)
            needs = size * self._seconds_per_byte[flow[0]]
            others = max(0.0, self._down_free[flow[0]] - now)
            self._land(now, flow[0], size)
            through.append((max(now, began + needs + others), flow))
        return through

    def cancel(self, now: float, source: int, size: int) -> None:
        """The receiver hangs up before the last ``size`` bytes: what begins from now on need not wait for them."""
        if source != MIRROR:
            self._up_free[source] = max(now, self._up_free[source] - size * self._seconds_per_byte[source])

    def _advance(self, now: float) -> None:
        if self._flows:
            self._served += (now - self._at) * self._mirror_rate / len(self._flows)
        self._at = now

    def _land(self, through: float, target: int, size: int) -> float:
        needs = size * self._seconds_per_byte[target]
        begins = through - needs
        free = self._down_free[target]
        landed = self._down_free[target] = (max(begins, free)) + needs
        return landed


class FluidLinks:
    """Max-min fair shares of every up- and downlink, computed anew whenever a flow begins or ends."""

    def __init__(self, mirror_rate: float, rates: list[float]) -> None:
        self._rates = {("up", MIRROR): mirror_rate} | {
            (way, node): rate for node, rate in enumerate(rates) for way in ("up", "down")
        }
        self._left: dict[Flow, float] = {}
        self._share: dict[Flow, float] = {}
        self._at = 0.0

    def send(self, now: float, flow: Flow, size: int) -> float | None:
        self._advance(now)
        self._left[flow] = size
        self._share_out()
        return None

    def cancel(self, now: float, source: int, size: int) -> None:
        """Exact flows are not given up: this model is for clusters without faults."""

    def next_tick(self, now: float) -> float | None:
        self._advance(now)
        return min((now + max(0.0, left) / self._share[flow] for flow, left in self._left.items()), default=None)

    def arrived(self, now: float) -> list[tuple[float, Flow]]:
        self._advance(now)
        through = [flow for flow, left in self._left.items() if left <= 1e-3]
        for flow in through:
            del self._left[flow]
        self._share_out()
        return [(now, flow) for flow in through]

    def _advance(self, now: float) -> None:
        for flow in self._left:
            self._left[flow] -= (now - self._at) * self._share[flow]
        self._at = now

    def _share_out(self) -> None:
        """Progressive filling: the tightest link gives its flows equal shares, and so on with what is left."""
        free = dict(self._rates)
        on: dict[tuple[str, int], set[Flow]] = {}
        for flow in self._left:
            on.setdefault(("up", flow[2]), set()).add(flow)
            on.setdefault(("down", flow[0]), set()).add(flow)
        self._share = {}
        while on:
            tightest = min(on, key=lambda link: (free[link] / len(on[link]), link))
            share = free[tightest] / len(on[tightest])
            for flow in on.pop(tightest):
                self._share[flow] = share
                other = ("down", flow[0]) if tightest[0] == "up" else ("up", flow[2])
                free[other] -= share
                on[other].discard(flow)
                if not on[other]:
                    del on[other]
