"""How peers do: which are avoided for a while, and when a chunk is late."""

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
    """What a peer did, with the seconds that it is avoided for the first time, and at most."""

    SLOW = (60.0, 600.0)  # left at a deadline: a chunk was on its way for long, and is asked for twice
    FAILED = (2.0, 60.0)  # refused, reset, said that it has not what it owns, or closed too early
    WRONG = (30.0, 600.0)  # its bytes were not those of the chunk: a broken disk or memory does not heal by itself

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self.first_seconds = first_seconds
        self.longest_seconds = longest_seconds


@dataclass(slots=True)
class _Record:
    seconds: float  # how long it was avoided the last time
    until: float  # when that is over
    is_on_trial: bool = True  # whether a first request afterwards is still to succeed
    trial_until: float = 0.0  # when nobody waits for that request any more


class PeerHealth:
    """The peers of one agent, by name. Not safe for threads. ``now`` is in seconds, of any clock that does not go back.

    A peer at fault is avoided, and twice as long with each fault after a trial. When the time is over, one request at a time
    is its trial: until one succeeded, everybody else still avoids it. Each success halves the next avoidance.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def is_avoided(self, peer: str, now: float) -> bool:
        """Whether a request that began now should go elsewhere."""
        record = self._records.get(peer)
        return record is not None and (now < record.until or (record.is_on_trial and now < record.trial_until))

    def is_at_fault(self, peer: str, now: float) -> bool:
        """Whether nobody is to ask it yet; unlike ``is_avoided`` not because somebody's request is its trial."""
        record = self._records.get(peer)
        return record is not None and now < record.until

    def claim(self, peer: str, now: float) -> bool:
        """Begin a request; False when the peer is avoided. A trial whose end nobody reports is forgotten after half a minute."""
        if self.is_avoided(peer, now):
            return False
        record = self._records.get(peer)
        if record is not None and record.is_on_trial:
            record.trial_until = now + _TRIAL_SECONDS
        return True

    def succeeded(self, peer: str, now: float) -> None:
        """A request brought what it should. One that began before the peer came out of favour changes nothing."""
        record = self._records.get(peer)
        if record is None or now < record.until:
            return
        record.is_on_trial = False
        record.seconds /= _GROWTH
        if record.seconds < _FORGOTTEN_SECONDS:
            del self._records[peer]

    def blame(self, peer: str, fault: Fault, now: float) -> None:
        """A request went wrong. Several that were under way together are one incident, as bad as the worst of them."""
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
        """The names of those who are avoided, in order."""
        return tuple(sorted(peer for peer in self._records if self.is_avoided(peer, now)))

    def keep(self, peers: Collection[str]) -> None:
        """Forget all others: they left the cluster."""
        self._records = {peer: record for peer, record in self._records.items() if peer in peers}


_REMEMBERED: Final = 200  # chunks
_LATELY: Final = 16  # chunks
_NEEDED: Final = 8  # fewer tell nothing about what is usual
_TAIL: Final = 0.99
_USUAL: Final = 0.9
_MANY: Final = 100  # from here on the 99th percentile is more than the slowest of a few
_SLACK: Final = 2.0
_SLACK_OF_FEW: Final = 4.0
_SHARED: Final = 1 / 3  # of the other peers
_OVERHEAD_SIZE: Final = 1024 * 1024  # asking and being answered takes as long as so many bytes more


class Deadlines:
    """How long a chunk may keep us waiting: twice the 99th percentile of the last 200, in proportion to their bytes.

    Four times while fewer than 100 are known: the first ones come over links that are still empty. Chunks from the mirror count
    as well: a node whose own link is slow finds everybody slow, and is to blame nobody. A deadline is asked for when it is to
    be judged, so that what others achieve meanwhile counts. Not safe for threads. Times are in seconds, sizes in bytes.

    Source: Dean and Barroso, "The Tail at Scale" (2013), with a deadline so late that under 1 % of the chunks meet it.
    """

    def __init__(self, *, shortest: float = 1.0, longest: float = 300.0) -> None:
        """``longest`` is the answer while fewer than 8 chunks are known."""
        self._shortest = shortest
        self._longest = longest
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)  # seconds per byte, oldest first

    def came(self, size: int, seconds: float) -> None:
        """``size`` bytes came, from a source that was not left, this long after its answer began."""
        self._paces.append(seconds / (size + _OVERHEAD_SIZE))

    def left(self) -> None:
        """A chunk was asked for elsewhere at its deadline. It counts as one at the percentile.

        If it did not count, the deadline would go down again and again; if it counted with its time, stalled peers would bring it up.
        """
        if self._paces:
            self._paces.append(_percentile(self._paces, _TAIL))

    def deadline(self, size: int) -> float:
        """Seconds that ``size`` bytes may take, from the moment when an answer begins."""
        if len(self._paces) < _NEEDED:
            return self._longest
        slack = _SLACK_OF_FEW if len(self._paces) < _MANY else _SLACK
        return min(
            self._longest, max(self._shortest, slack * _percentile(self._paces, _TAIL) * (size + _OVERHEAD_SIZE))
        )

    def unless_shared(self, limit: float, waits: Collection[tuple[str, float]], others: int) -> float:
        """The limit for a peer, or the longest one while over a third of the other peers have kept us waiting for half of the limit.

        ``waits`` are the requests to other peers that have no answer yet: the peer, and the seconds until now. ``others`` is how many other
        peers there are. When so many are late at once, they wait for the same slow upstream, or this node stood still. If the chunks
        were asked for elsewhere, the upstream would send them twice.
        """
        late = {peer for peer, seconds in waits if seconds >= limit / 2}
        return max(limit, self._longest) if len(late) > _SHARED * others else limit

    def usual(self, size: int) -> float:
        """Seconds that nine of ten chunks with ``size`` bytes take at most; twice as many while few are known."""
        return min(self._longest, self.common(size) * (1.0 if len(self._paces) >= _MANY else 2.0))

    def common(self, size: int) -> float:
        """Seconds that nine of ten of the known chunks would have taken at most, had they had ``size`` bytes.

        Never less than the shortest deadline: on a fast network everybody waits for a disk now and then.
        """
        return self._common(list(self._paces), size)

    def lately(self, size: int) -> float:
        """As ``common``, of the last 16 chunks: when all of a manifest is in the cluster, nobody waits for the mirror any more."""
        return self._common(list(self._paces)[-_LATELY:], size)

    def _common(self, paces: list[float], size: int) -> float:
        if len(paces) < _NEEDED:
            return self._longest
        return max(self._shortest, _percentile(paces, _USUAL) * (size + _OVERHEAD_SIZE))


def _percentile(paces: Collection[float], share: float) -> float:
    """Chunks come much more often than anybody asks: sorted only then, in 10 to 20 microseconds."""
    return sorted(paces)[ceil(share * len(paces)) - 1]
