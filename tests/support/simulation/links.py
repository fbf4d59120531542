"""Links of a simulated cluster: how long chunks take from one machine to another.

Two models with the same face. ``QueuedLinks`` costs one event for each chunk and carries a thousand nodes;
``tests.support.simulation.fluid`` is exact and slow. A test holds the one against the other.
Machines are numbers; ``MIRROR`` is one of them. Rates are bytes per second.
"""

from heapq import heapify, heappop, heappush
from typing import Protocol

MIRROR = -1
Flow = tuple[int, int, int]  # to whom, which chunk, from whom


class Links(Protocol):
    def send(self, now: float, flow: Flow, size: int) -> float | None:
        """Begin; the time of arrival, where it is known now. Otherwise ``arrived`` will tell."""
        ...

    def missing(self, now: float, flow: Flow, arrives: float) -> int:
        """Bytes of a flow that have not come. ``arrives`` is what ``send`` told."""
        ...

    def cancel(self, now: float, flow: Flow, missing: int) -> None:
        """The last ``missing`` bytes are not wanted any more."""
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
        through = (max(begins, now)) + size * self._seconds_per_byte[source]
        self._up_free[source] = through
        return self._land(now, through, target, size)

    def missing(self, now: float, flow: Flow, arrives: float) -> int:
        target, _, source = flow
        slower = max(self._seconds_per_byte[target], self._seconds_per_byte[source])
        return int((arrives - now) / slower) + 1

    def cancel(self, now: float, flow: Flow, missing: int) -> None:
        source = flow[2]
        if source == MIRROR:
            self._advance(now)
            self._flows = [other for other in self._flows if other[1] != flow]
            heapify(self._flows)
        else:
            self._up_free[source] = max(now, self._up_free[source] - missing * self._seconds_per_byte[source])

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
            self._land(now, now, flow[0], size)
            through.append((max(now, began + needs + others), flow))
        return through

    def _advance(self, now: float) -> None:
        if self._flows:
            self._served += (now - self._at) * self._mirror_rate / len(self._flows)
        self._at = now

    def _land(self, now: float, through: float, target: int, size: int) -> float:
        """The downlink has so much more to do from now on; a source that is slower than that keeps nobody else waiting."""
        free = self._down_free[target]
        free = self._down_free[target] = (max(free, now)) + size * self._seconds_per_byte[target]
        return max(free, through)
