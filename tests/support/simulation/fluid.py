"""Exact links of a simulated cluster: all flows share all links at every moment as fairly as it is possible (max-min)."""

from tests.support.simulation.links import MIRROR, Flow

_THROUGH = 1e-3  # bytes that are nothing: what is left of rounding


class FluidLinks:
    """``Links`` whose shares are computed anew whenever a flow begins or ends."""

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
