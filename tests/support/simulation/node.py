"""What is simulated: a cluster and what happens to it, and the state of one of its nodes."""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.ring.peer_health import Deadlines, HedgeBudget, PeerHealth
from node_agent.fetch.deadlines import SourceDeadline

OWN, PEERS = 0, 1


@dataclass(frozen=True)
class Case:
    """A cluster and what happens to it. Times are in seconds, rates in bytes per second; ``kills`` and the like name nodes."""

    nodes: int
    chunks: int
    rate: float = 1.25e9
    mirror_rate: float = 1.25e9
    in_flight: int = 8
    starts: dict[int, float] = field(default_factory=dict)
    kills: dict[int, float] = field(default_factory=dict)
    slow: dict[int, float] = field(default_factory=dict)  # how many times slower
    joins: dict[int, float] = field(default_factory=dict)  # members from then on only; they stage at once

    @property
    def alone_seconds(self) -> float:
        """What a node alone needs."""
        return self.chunks * CHUNK_SIZE / min(self.rate, self.mirror_rate)


@dataclass(slots=True, eq=False)
class Asked:
    """A chunk, or the rest of it, on its way to a node's fill."""

    lane: int
    source: int
    asked: float
    size: int = CHUNK_SIZE
    began: float | None = None  # its answer
    arrives: float = inf  # where it is known
    seen: int = 0  # bytes that its patience knows of
    patience: SourceDeadline | None = None


class Node:
    """One node: what its disk holds, what its fill has asked for, and what its agent knows about its peers."""

    def __init__(self, number: int, case: Case) -> None:
        self.number = number
        self.name = f"node-{number:04}"
        self.held = bytearray(case.chunks)  # can be served
        self.filled = bytearray(case.chunks)  # has come to the fill
        self.left = case.chunks
        self.orders: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.positions = [0, 0]
        self.slots = (1, 1)
        self.asked: dict[int, Asked] = {}
        self.reading: dict[int, float] = {}  # from the mirror, for its own fill or for peers, since when
        self.obtaining: set[int] = set()  # those for peers alone
        self.to_obtain: deque[int] = deque()  # when one of those is through
        self.parked: dict[int, list[tuple[Node, Asked]]] = {}  # by chunk, the peers that wait for it here
        self.heads = Deadlines(shortest=3.0)  # until an answer begins
        self.bodies = Deadlines()  # and from there to its end
        self.standing = PeerHealth()
        self.hedges = HedgeBudget(case.chunks * CHUNK_SIZE)
        self.retries = 0
        self.is_alive = True
        self.finished_at: float | None = None
