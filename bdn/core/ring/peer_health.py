"""Which peers are left alone for a while, because they failed, lied or were slow, and when they are tried again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

_TRIAL_SECONDS: Final = 30.0
_GROWTH: Final = 2.0
_FORGOTTEN_SECONDS: Final = 1.0


class Fault(Enum):
    """What a peer did, with the seconds that it is avoided for the first time, and at most."""

    SLOW = (60.0, 600.0)  # left at a deadline: a chunk was on its way for long, and is asked for twice
    FAILED = (2.0, 60.0)  # refused, reset, said that it has not what it owns, or closed too early
    WRONG = (30.0, 600.0)  # its bytes were not those of the chunk: a broken disk or memory does not heal by itself

    @property
    def first_seconds(self) -> float:
        """For a peer in good standing."""
        return self.value[0]

    @property
    def longest_seconds(self) -> float:
        """However often it happens."""
        return self.value[1]


@dataclass(slots=True)
class _Record:
    seconds: float  # how long it was avoided the last time
    until: float  # when that is over
    is_on_trial: bool = True  # whether a first request afterwards is still to succeed
    trial_until: float = 0.0  # when nobody waits for that request any more


class PeerHealth:
    """The peers of one agent, by name. Those of whom nothing is known are in good standing.

    A peer that is at fault is avoided, and twice as long with each fault after a trial. When the time is over, one request
    at a time is its trial: until one succeeded, everybody else still avoids it. Each success halves what it will be avoided
    for the next time, so that a peer that fails now and then is not trusted anew every time.

    Not safe for threads by itself. ``now`` is in seconds, of any clock that does not go back.
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
        """Begin a request; False when the peer is avoided. The first one after a time of avoidance is its trial.

        A trial whose end nobody reports, as that of a stage that was canceled, is forgotten after half a minute.
        """
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
        """A request went wrong.

        Several that were under way together are one incident: it counts once, with the worst of them.
        """
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
