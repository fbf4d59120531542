"""Links of a simulated cluster: how long chunks take from one machine to another.

Two models with the same methods. ``QueuedLinks`` costs one event for each chunk and carries a thousand nodes; ``FluidLinks`` is
exact and slow. A test holds the one against the other. Machines are numbers; ``MIRROR`` is one of them. Rates are bytes per second.
"""

from heapq import heapify, heappop, heappush

MIRROR = -1
Flow = tuple[int, int, int]  # to whom, which chunk, from whom
_THROUGH = 1e-3  # bytes that are nothing: what is left of rounding


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
        """Begin; the time of arrival, where it is known now. Otherwise ``arrived`` will tell."""
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
        """Bytes of a flow that have not come. ``arrives`` is what ``send`` told."""
        target, _, source = flow
        slower = max(self._seconds_per_byte[target], self._seconds_per_byte[source])
        return int((arrives - now) / slower) + 1

    def cancel(self, now: float, flow: Flow, missing: int) -> None:
        """The last ``missing`` bytes are not wanted any more."""
        source = flow[2]
        if source == MIRROR:
            self._advance(now)
            self._flows = [other for other in self._flows if other[1] != flow]
            heapify(self._flows)
        else:
            self._up_free[source] = max(now, self._up_free[source] - missing * self._seconds_per_byte[source])

    def next_tick(self, now: float) -> float | None:
        """When to ask ``arrived``, unless something begins before."""
        self._advance(now)
        if not self._flows:
            return None
        return now + max(0.0, self._flows[0][0] - self._served) * len(self._flows) / self._mirror_rate

    def arrived(self, now: float) -> list[tuple[float, Flow]]:
        """What has come through, and when."""
        self._advance(now)
        through = []
        while self._flows and self._flows[0][0] <= self._served + _THROUGH:
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


class FluidLinks:
    """All flows share all links at every moment as fairly as it is possible (max-min), anew whenever one begins or ends."""

    def __init__(self, mirror_rate: float, rates: list[float]) -> None:
        self._rates = {("up", MIRROR): mirror_rate} | {
            (way, node): rate for node, rate in enumerate(rates) for way in ("up", "down")
        }
        self._left: dict[Flow, float] = {}
        self._share: dict[Flow, float] = {}
        self._at = 0.0
        self._is_stale = False

    def send(self, now: float, flow: Flow, size: int) -> float | None:
        self._advance(now)
        self._left[flow] = size
        self._is_stale = True
        return None

    def missing(self, now: float, flow: Flow, arrives: float) -> int:
        self._advance(now)
        return int(max(0.0, self._left[flow])) + 1 if flow in self._left else 0

    def cancel(self, now: float, flow: Flow, missing: int) -> None:
        self._advance(now)
        self._left.pop(flow, None)
        self._is_stale = True

    def next_tick(self, now: float) -> float | None:
        self._advance(now)
        self._share_out()
        return min((now + max(0.0, left) / self._share[flow] for flow, left in self._left.items()), default=None)

    def arrived(self, now: float) -> list[tuple[float, Flow]]:
        self._advance(now)
        through = [flow for flow, left in self._left.items() if left <= _THROUGH]
        for flow in through:
            del self._left[flow]
        self._is_stale = True
        return [(now, flow) for flow in through]

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._share_out()
            for flow in self._left:
                self._left[flow] -= (now - self._at) * self._share[flow]
            self._at = now

    def _share_out(self) -> None:
        """Progressive filling: the tightest link gives its flows equal shares, and so on with what is left."""
        if not self._is_stale:
            return
        self._is_stale = False
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


Links = QueuedLinks | FluidLinks
