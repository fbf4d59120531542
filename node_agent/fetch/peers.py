"""The members of this cluster, and as sources of chunks: which are avoided, and how long their chunks take."""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth
from bdn.disk.durable import disk_errors, write_durably
from bdn.wire import operation_schema
from node_agent.fetch.deadlines import Clock, Limits


@dataclass(frozen=True, slots=True)
class RingMember:
    """An owner of chunks: an agent with the role ``cluster``, and the address at which its peers read from it."""

    node: str
    advertise: str


@dataclass(frozen=True, slots=True)
class View:
    """The owners at one epoch, in the order of their names. The same members make the same placement at any epoch."""

    epoch: int
    members: tuple[RingMember, ...]


class Members:
    """The newest view. ``me`` is this node's own name. May be used from any thread.

    A view that the mirror asked about later is never undone by an answer to an earlier question: A asks, and waits with
    its question open; B asks, is answered with epoch 7, and then A's answer comes with epoch 6. Otherwise the mirror is
    believed, even when its epoch is an older one: then its database is another, or was set back.
    """

    def __init__(self, me: str, path: Path) -> None:
        self.me = me
        self._path = path
        self._view = View(0, ())
        self._taken = 0  # answers taken up
        self._lock = threading.Lock()

    def current(self) -> View:
        """The newest view; without members until a mirror was heard of."""
        return self._view

    def load(self) -> None:
        """The view of the last run. Blocking. A damaged file is as good as none: the next heartbeat brings the members."""
        try:
            content = json.loads(self._path.read_bytes())
            self._view = View(int(content["epoch"]), tuple(RingMember(**member) for member in content["members"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._view = View(0, ())

    def ask(self) -> int:
        """To be called before the mirror is asked; ``take`` wants the result with the answer."""
        return self._taken

    def take(self, epoch: int, members: Iterable[operation_schema.MemberDocument], asked: int) -> bool:
        """Believe an answer, unless a newer one came while it was on its way; returns whether the view is another now.

        Blocking when it is. Raises ``DiskFailedError``: the view is believed, but could not be kept for the next start.
        """
        owners = sorted(
            (RingMember(member.node, member.advertise) for member in members if _owns(member) and member.advertise),
            key=lambda member: member.node,
        )
        view = View(epoch, tuple(owners))
        with self._lock:
            if view == self._view or (epoch < self._view.epoch and asked != self._taken):
                return False
            self._view, self._taken = view, self._taken + 1
            with disk_errors(self._path):
                write_durably(self._path, json.dumps(asdict(view)).encode())
        return True


def _owns(member: operation_schema.MemberDocument) -> bool:
    return "cluster" in member.roles


# Towards the end of a stage we wait for an answer twice as long as nine of ten took to begin lately: whoever is asked instead
# has to read the chunk from the mirror first, which then sends it once more.
_ENDING: Final = 2.0
_LEAST_ENDING_SECONDS: Final = 10.0
MIRROR: Final = ""  # among the names of sources; no node is called so


class Peers:
    """Shared by all stages of the agent: what one stage learns about a peer, the others know. Safe for any thread."""

    def __init__(self, members: Members, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.members = members
        self._standing = PeerHealth()
        self._mirror = PeerHealth()
        self._heads = Deadlines(shortest=3.0)  # in a cold cluster owners wait for the mirror
        self._bodies = Deadlines()
        self._lock = threading.Lock()

    def address(self, node: str) -> str | None:
        """Where it serves chunks; None when it has left."""
        return next((member.advertise for member in self.members.current().members if member.node == node), None)

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
            self._standing.keep({member.node for member in self.members.current().members})
            return self._standing.avoided(self.clock())
