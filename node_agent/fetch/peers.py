"""This agent's peers as sources of chunks: where they are, how they stand, and how long their chunks take."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from bdn.core.ring.hedging import Deadlines
from bdn.core.ring.peer_health import Fault, PeerHealth
from node_agent.fetch.deadlines import Clock, Limits
from node_agent.fetch.members import Members

# Towards the end of a stage we wait for an answer twice as long as nine of ten took to begin lately: whoever is asked instead
# has to read the chunk from the mirror first, which then sends it once more.
_ENDING: Final = 2.0
_LEAST_ENDING_SECONDS: Final = 10.0
MIRROR: Final = ""  # among the names of sources; no node is called so


class Peers:
    """Shared by all stages of the agent: what one stage learns about a peer, the others know. Safe for any thread."""

    def __init__(self, members: Members, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._members = members
        self._standing = PeerHealth()
        self._mirror = PeerHealth()
        self._heads = Deadlines(shortest=3.0)  # in a cold cluster owners wait for the mirror
        self._bodies = Deadlines()
        self._lock = threading.Lock()

    def address(self, node: str) -> str | None:
        """Where it serves chunks; None when it has left."""
        return next((member.advertise for member in self._members.current().members if member.node == node), None)

    def is_avoided(self, node: str) -> bool:
        """Whether it is left alone just now."""
        with self._lock:
            return self._standing.is_avoided(node, self.clock())

    def is_at_fault(self, node: str) -> bool:
        """Whether a request to it that is under way had better end: one was left, and its time is not over."""
        with self._lock:
            return self._standing.is_at_fault(node, self.clock())

    def claim(self, node: str) -> bool:
        """Whether it may be asked now. The end is to be reported, by ``served`` or ``blame``."""
        with self._lock:
            return self._standing.claim(node, self.clock())

    def served(self, node: str, size: int, taken: Limits) -> None:
        """It sent so many bytes in so long, and the chunk is right."""
        with self._lock:
            self._standing.succeeded(node, self.clock())
            self._heads.came(0, taken.head_seconds)
            self._bodies.came(size, taken.body_seconds)

    def read(self, size: int, taken: Limits) -> None:
        """The mirror sent so many bytes in so long. An owner's answer begins when it has read as much."""
        with self._lock:
            self._mirror.succeeded(MIRROR, self.clock())
            self._heads.came(0, taken.head_seconds + taken.body_seconds)
            self._bodies.came(size, taken.body_seconds)

    def blame_mirror(self) -> None:
        """It is out of reach, or out of order."""
        with self._lock:
            self._mirror.blame(MIRROR, Fault.FAILED, self.clock())

    def is_mirror_avoided(self) -> bool:
        """Whether whoever else may have a chunk is asked before the mirror just now."""
        with self._lock:
            return self._mirror.is_at_fault(MIRROR, self.clock())

    def blame(self, node: str, fault: Fault) -> None:
        """It did not do its part."""
        with self._lock:
            self._standing.blame(node, fault, self.clock())

    def sent_wrong(self, senders: Sequence[str]) -> None:
        """A chunk is wrong. Who sent all of it is at fault; of several, nobody knows which one is."""
        fault = Fault.WRONG if len(senders) == 1 else Fault.FAILED
        for sender in senders:
            if sender != MIRROR:
                self.blame(sender, fault)

    def late(self, node: str, *, has_begun: bool) -> None:
        """It was left at a limit, before or after its answer had begun."""
        with self._lock:
            self._standing.blame(node, Fault.SLOW, self.clock())
            (self._bodies if has_begun else self._heads).left()

    def limits(self, size: int) -> Limits:
        """How long ``size`` bytes from a peer may take, by what is known now."""
        with self._lock:
            return Limits(
                self._heads.deadline(0),
                self._bodies.deadline(size),
                usual_seconds=self._bodies.usual(size),
                ending_head_seconds=max(_LEAST_ENDING_SECONDS, _ENDING * self._heads.lately(0)),
            )

    def avoided(self) -> tuple[str, ...]:
        """Who is avoided now, of those who are members."""
        with self._lock:
            self._standing.keep({member.node for member in self._members.current().members})
            return self._standing.avoided(self.clock())
