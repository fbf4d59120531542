"""When a chunk has kept us waiting for too long, and how much may be asked for a second time because of it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil
from typing import Final

_REMEMBERED: Final = 200  # chunks
_NEEDED: Final = 8  # fewer tell nothing about what is usual
_NEEDED_FOR_HALF: Final = 4
_TAIL: Final = 0.99
_MANY: Final = 100  # from here on the 99th percentile is more than the slowest of a few
_SLACK: Final = 2.0
_SLACK_OF_FEW: Final = 4.0
_OVERHEAD_SIZE: Final = 1024 * 1024  # asking and being answered takes as long as so many bytes more


class Deadlines:
    """How long a chunk may keep us waiting: twice the 99th percentile of the last 200, in proportion to their bytes.

    Four times while fewer than 100 are known: the first ones come over links that are still empty.
    One for the wait until answers begin, and one for the bytes from there on. The chunks that come from the mirror count as
    well: nobody can say that a peer is slow, who knows nothing else; and a node whose own link is slow finds everybody slow, and
    is to blame nobody. A deadline is asked for when it is to be judged, and not when the request begins, so that what others
    achieve in the meantime counts.
    Not safe for threads by itself. Times are in seconds, sizes in bytes.

    Source: Dean and Barroso, "The Tail at Scale" (2013), with a deadline so late that under 1 % of the chunks meet it.
    """

    def __init__(self, *, shortest: float = 1.0, longest: float = 300.0) -> None:
        """``longest`` is the answer while fewer than 8 chunks are known."""
        self._shortest = shortest
        self._longest = longest
        self._paces: deque[float] = deque()  # seconds per byte, oldest first
        self._sorted: list[float] = []  # the same

    def came(self, size: int, seconds: float) -> None:
        """``size`` bytes came, from a source that was not left, this long after its answer began."""
        self._remember(seconds / (size + _OVERHEAD_SIZE))

    def left(self) -> None:
        """A chunk was asked for elsewhere at its deadline: it belongs to the tail, and how far out it was remains unknown.

        It counts as one at the percentile. If it did not count, cutting off the tail would bring the deadline down again and
        again; if it counted with its time, every stalled peer would bring it up.
        """
        if self._sorted:
            self._remember(self._tail())

    def deadline(self, size: int) -> float:
        """Seconds that ``size`` bytes may take, from the moment when an answer begins."""
        if len(self._paces) < _NEEDED:
            return self._longest
        slack = _SLACK_OF_FEW if len(self._paces) < _MANY else _SLACK
        return min(self._longest, max(self._shortest, slack * self._tail() * (size + _OVERHEAD_SIZE)))

    def usual(self, size: int) -> float:
        """Seconds that half of all chunks with ``size`` bytes take at most, of those that were waited for to the end."""
        if len(self._paces) < _NEEDED_FOR_HALF:
            return self._longest
        return self._sorted[len(self._sorted) // 2] * (size + _OVERHEAD_SIZE)

    def _tail(self) -> float:
        return self._sorted[ceil(_TAIL * len(self._sorted)) - 1]

    def _remember(self, pace: float) -> None:
        if len(self._paces) == _REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._paces.popleft())]
        self._paces.append(pace)
        insort(self._sorted, pace)


class HedgeBudget:
    """Bytes that one stage may ask for twice, because the first source let it wait. Not safe for threads by itself."""

    def __init__(self, stage_size: int, *, share: float = 0.05) -> None:
        """``share`` of the bytes of the whole stage."""
        self.limit = int(stage_size * share)
        self.used = 0

    def take(self, size: int) -> bool:
        """Count ``size`` bytes that are asked for again; False when they would be too many, and nothing is counted."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True
