"""Peer health: which peers are avoided for a while, and when a chunk is late."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Final

_TRIAL_SECONDS: Final = 30.0
_GROWTH: Final = 2.0
_FORGOTTEN_SECONDS: Final = 1.0


class Fault(Enum):
    """A peer's fault, with the first and the longest avoidance in seconds."""

    SLOW = (60.0, 600.0)  # missed a deadline: the chunk took long and is requested twice
    FAILED = (2.0, 60.0)  # refused, reset, lacked a chunk that it owns, or closed early
    WRONG = (30.0, 600.0)  # sent wrong bytes: a broken disk or memory does not heal

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self.first_seconds = first_seconds
        self.longest_seconds = longest_seconds


@dataclass(slots=True)
class _Record:
    seconds: float  # length of the last avoidance
    until: float  # end of the last avoidance
    is_on_trial: bool = True  # no request has succeeded since the avoidance
    trial_until: float = 0.0  # end of the wait for the trial request


class PeerHealth:
    """Health of one agent's peers, by name. Not thread-safe. ``now`` is in seconds of a clock that never goes back.

    A faulty peer is avoided, twice as long for each fault after a trial. After the avoidance one request at a time is
    the peer's trial, and all other requests still avoid the peer until one trial succeeded. Each success halves the
    next avoidance.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def is_avoided(self, peer: str, now: float) -> bool:
        """Whether a request that begins now should use another peer."""
        record = self._records.get(peer)
        return record is not None and (now < record.until or (record.is_on_trial and now < record.trial_until))

    def is_at_fault(self, peer: str, now: float) -> bool:
        """Whether the peer's avoidance is still running. Unlike ``is_avoided``, ignores trials in progress."""
        record = self._records.get(peer)
        return record is not None and now < record.until

    def claim(self, peer: str, now: float) -> bool:
        """Begin a request; False when the peer is avoided.

        A trial without a reported end expires after half a minute.
        """
        if self.is_avoided(peer, now):
            return False
        record = self._records.get(peer)
        if record is not None and record.is_on_trial:
            record.trial_until = now + _TRIAL_SECONDS
        return True

    def succeeded(self, peer: str, now: float) -> None:
        """Report a successful request. A request from before the end of the avoidance changes nothing."""
        record = self._records.get(peer)
        if record is None or now < record.until:
            return
        record.is_on_trial = False
        record.seconds /= _GROWTH
        if record.seconds < _FORGOTTEN_SECONDS:
            del self._records[peer]

    def blame(self, peer: str, fault: Fault, now: float) -> None:
        """Report a fault. Concurrent faults are one incident, as severe as the worst of them."""
        record = self._records.get(peer)
        if record is None:
            self._records[peer] = _Record(fault.first_seconds, now + fault.first_seconds)
            return
        is_new = now >= record.until
        grown = min(record.seconds * _GROWTH, fault.longest_seconds) if is_new else record.seconds
        record.seconds = max(record.seconds, grown, fault.first_seconds)
        if is_new or fault is Fault.WRONG:
            record.until = max(record.until, now + record.seconds)
            record.is_on_trial, record.trial_until = True, 0.0

    def avoided(self, now: float) -> tuple[str, ...]:
        return tuple(sorted(peer for peer in self._records if self.is_avoided(peer, now)))

    def keep(self, peers: Collection[str]) -> None:
        """Drop the records of peers that left the cluster."""
        self._records = {peer: record for peer, record in self._records.items() if peer in peers}


_REMEMBERED: Final = 200  # chunks
_LATELY: Final = 16  # chunks
_NEEDED: Final = 8  # fewer do not show what is usual
_TAIL: Final = 0.99
_USUAL: Final = 0.9
_MANY: Final = 100  # with fewer, the 99th percentile is merely the slowest
_SLACK: Final = 2.0
_SLACK_OF_FEW: Final = 4.0
_SHARED: Final = 1 / 3  # of the other peers
_OVERHEAD_SIZE: Final = 1024 * 1024  # bytes that take as long as request and response header


class Deadlines:
    """Deadlines for chunks: twice the 99th percentile of the last 200 chunks, in proportion to their size.

    Four times while fewer than 100 are known, because the first chunks use empty links. Chunks from the mirror count as
    well: a node with a slow link finds all peers slow, and must blame none. Callers compute a deadline at the moment of
    judging, so that other requests' progress counts. Not thread-safe. Times are in seconds, sizes in bytes.

    Source: Dean and Barroso, "The Tail at Scale" (2013), with a deadline so late that under 1 % of the chunks meet it.
    """

    def __init__(self, *, shortest: float = 1.0, longest: float = 300.0) -> None:
        """``longest`` is the deadline while fewer than 8 chunks are known."""
        self._shortest = shortest
        self._longest = longest
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)  # seconds per byte, oldest first

    def came(self, size: int, seconds: float) -> None:
        """Report ``size`` bytes from a source that met its deadline, ``seconds`` after its response began."""
        self._paces.append(seconds / (size + _OVERHEAD_SIZE))

    def left(self) -> None:
        """Report a missed deadline. The chunk counts as one at the percentile.

        If it did not count, the deadline would shrink again and again; if its time counted, stalled peers would raise
        the deadline.
        """
        if self._paces:
            self._paces.append(_percentile(self._paces, _TAIL))

    def deadline(self, size: int) -> float:
        """Seconds allowed for ``size`` bytes, from the start of a response."""
        if len(self._paces) < _NEEDED:
            return self._longest
        slack = _SLACK_OF_FEW if len(self._paces) < _MANY else _SLACK
        return min(
            self._longest, max(self._shortest, slack * _percentile(self._paces, _TAIL) * (size + _OVERHEAD_SIZE))
        )

    def unless_shared(self, limit: float, waits: Collection[tuple[str, float]], others: int) -> float:
        """Return a peer's limit, or the longest while over a third of the other peers are late for half of the limit.

        ``waits`` are the pending requests to other peers: peer and seconds so far. ``others`` is the number of other
        peers. So many late peers wait for the same slow upstream, or this node was paused. Requesting the chunks
        elsewhere would make the upstream send them twice.
        """
        late = {peer for peer, seconds in waits if seconds >= limit / 2}
        return max(limit, self._longest) if len(late) > _SHARED * others else limit

    def usual(self, size: int) -> float:
        """Seconds in which nine of ten chunks of ``size`` bytes arrive; doubled while few are known."""
        return min(self._longest, self.common(size) * (1.0 if len(self._paces) >= _MANY else 2.0))

    def common(self, size: int) -> float:
        """Seconds in which nine of ten known chunks would have arrived, had they ``size`` bytes.

        Never less than the shortest deadline: on a fast network every peer waits for a disk now and then.
        """
        return self._common(list(self._paces), size)

    def lately(self, size: int) -> float:
        """Like ``common``, over the last 16 chunks.

        Once a whole manifest is in the cluster, no peer waits for the mirror.
        """
        return self._common(list(self._paces)[-_LATELY:], size)

    def _common(self, paces: list[float], size: int) -> float:
        if len(paces) < _NEEDED:
            return self._longest
        return max(self._shortest, _percentile(paces, _USUAL) * (size + _OVERHEAD_SIZE))


def _percentile(paces: Collection[float], share: float) -> float:
    """Sorts at each call (10 to 20 microseconds): chunks arrive much more often than deadlines are computed."""
    return sorted(paces)[ceil(share * len(paces)) - 1]
