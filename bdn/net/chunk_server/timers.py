"""When to look at which parked connection again. No clock and no locks of its own."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timers:
    """One moment per key. A moment that moves later costs nothing: its entry in the heap is put right when it comes up.

    So a connection that is parked after each of a thousand answers, for 60 s each time, has one entry and not a thousand.
    """

    _moments: dict[int, float] = field(default_factory=dict)
    _heap: list[tuple[float, int]] = field(default_factory=list)
    _queued: dict[int, float] = field(default_factory=dict)  # the earliest entry of each key in the heap

    def set(self, key: int, moment: float) -> None:
        """Forget what was set for this key before."""
        self._moments[key] = moment
        if moment < self._queued.get(key, float("inf")):
            self._queued[key] = moment
            heapq.heappush(self._heap, (moment, key))

    def clear(self, key: int) -> None:
        """Nothing is to happen for this key; fine when nothing was."""
        self._moments.pop(key, None)

    @property
    def next(self) -> float | None:
        """Nothing is due before this moment. That something is due then is not said."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[int]:
        """The keys whose moment has come, which are cleared."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            queued, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # an earlier entry took its place
            del self._queued[key]
            moment = self._moments.get(key)
            if moment is None:
                continue
            if moment <= now:
                del self._moments[key]
                keys.append(key)
            else:
                self.set(key, moment)
        return keys
