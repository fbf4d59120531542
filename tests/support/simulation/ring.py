"""A cluster that stages one manifest on simulated links, with the real rules: placement, lanes, routes, deadlines, patience, standing.

Nothing here decides: it carries out what ``bdn.core`` and the agent's patience say, as the agent does, and counts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.pace.retry import Allowance
from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth
from bdn.core.ring.placement import HOLDERS_ASKED, OWNERS_LOOKED_AT, Placement, ahead, in_flight_each, lanes, route
from node_agent.fetch.fill_context import HEDGED_SHARE
from node_agent.fetch.peers import Alternative, LateError, Limits, SourceDeadline
from tests.support.content.names import named
from tests.support.simulation.links import MIRROR, Links, QueuedLinks

LATENCY_SECONDS: Final = 0.0005
DEAD_SECONDS: Final = 2.0  # until a request to a machine that is gone has failed
LOOK_SECONDS: Final = 1.0  # between two looks at a request: as often as an owner says that it is at work
NEVER: Final = threading.Event()
OWN, PEERS = 0, 1
NOBODY: Final = MIRROR - 1  # the source of a chunk that waits for a place at its owner


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
        self.waiting: dict[int, list[tuple[int, Asked]]] = {}  # by peer, chunks that are not asked of it yet
        self.heads = Deadlines(shortest=3.0)  # until an answer begins
        self.bodies = Deadlines()  # and from there to its end
        self.standing = PeerHealth()
        self.hedges = Allowance(int(case.chunks * CHUNK_SIZE * HEDGED_SHARE))
        self.retries = 0
        self.is_alive = True
        self.finished_at: float | None = None


class Ring:
    """One run. ``run`` returns when nothing happens any more."""

    def __init__(self, case: Case, make_links: Callable[[float, list[float]], Links] = QueuedLinks) -> None:
        self.case = case
        self.nodes = [Node(number, case) for number in range(case.nodes)]
        self.by_name = {node.name: node for node in self.nodes}
        self.links = make_links(
            case.mirror_rate, [case.rate / case.slow.get(number, 1.0) for number in range(case.nodes)]
        )
        self.chunks: list[Digest] = [named(f"chunk {number}") for number in range(case.chunks)]
        self.origin_bytes = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = count()
        self._ticks = 0
        self._lots = Random(0)
        self._expected_at = -1.0
        self._now = 0.0  # the clock of the patience
        self._place(0.0)
        for node in self.nodes:
            self._at(case.joins.get(node.number, case.starts.get(node.number, 0.0)), self._start, node)
        for at in sorted(set(case.joins.values())):
            self._at(at, self._place)
        for number, at in case.kills.items():
            self._at(at, self._kill, self.nodes[number])

    def run(self) -> None:
        agenda = self._agenda
        while agenda:
            now, _, act, facts = heappop(agenda)
            act(now, *facts)

    @property
    def survivors(self) -> list[Node]:
        return [node for node in self.nodes if node.is_alive]

    @property
    def origin_ratio(self) -> float:
        return self.origin_bytes / (self.case.chunks * CHUNK_SIZE)

    @property
    def last_ratio(self) -> float:
        """When the last one is through that is neither dead nor slow itself, in times that a node alone needs."""
        ends = [node.finished_at for node in self.survivors if node.number not in self.case.slow]
        return max(float("inf") if end is None else end for end in ends) / self.case.alone_seconds

    def _at(self, when: float, act: Callable[..., None], *facts: object) -> None:
        heappush(self._agenda, (when, next(self._number), act, facts))

    # Members and their orders.

    def _place(self, now: float) -> None:
        """The members of this moment, for chunks that nobody has begun."""
        members = [node.name for node in self.nodes if self.case.joins.get(node.number, 0.0) <= now]
        self.placement = Placement(self.chunks, members)
        self._owners = [self.placement.owners(index, OWNERS_LOOKED_AT) for index in range(len(self.chunks))]
        for node in self.nodes:
            if node.orders != ((), ()) and node.is_alive:
                self._start(now, node)

    def _order(self, node: Node) -> None:
        order = lanes(self.placement, node.name)
        node.orders, node.positions = (order.own, order.peers), [0, 0]
        node.slots = (in_flight_each(len(self.placement.members), self.case.in_flight), self.case.in_flight)

    def _start(self, now: float, node: Node) -> None:
        """Or go on, in a new order: all slots that are free take up what is next."""
        self._order(node)
        busy = [sum(asked.lane == lane for asked in node.asked.values()) for lane in (OWN, PEERS)]
        for lane in (OWN, PEERS):
            for _ in range(busy[lane], node.slots[lane]):
                self._next(now, node, lane)

    def _next(self, now: float, node: Node, lane: int) -> None:
        """A slot of the lane is free."""
        order, position, asked = node.orders[lane], node.positions[lane], node.asked
        while position < len(order):
            index = order[position]
            position += 1
            if node.filled[index] or index in asked:
                continue
            if node.held[index]:
                self._fill(now, node, index)
                continue
            node.positions[lane] = position
            self._ask(now, node, index, lane, CHUNK_SIZE)
            return
        node.positions[lane] = position

    # One chunk of a fill.

    def _ask(self, now: float, node: Node, index: int, lane: int, size: int) -> None:
        """Here, from a peer, from the mirror: ``size`` bytes of it are missing."""
        standing = node.standing
        if node.held[index]:
            self._filled(now, node, index, lane)
            return
        owners = route(self._owners[index], node.name, lambda peer: standing.is_avoided(peer, now))
        for name in (*self._holders(now, node, index, owners), *owners):
            peer = self.by_name[name]
            in_flight = sum(asked.source == peer.number for asked in node.asked.values())
            usable = len(self.placement.members) - 1 - len(standing.avoided(now))
            if name in owners and in_flight >= in_flight_each(usable, self.case.in_flight):
                node.asked[index] = Asked(lane, NOBODY, now, size)
                node.waiting.setdefault(peer.number, []).append((index, node.asked[index]))
                return
            if standing.claim(name, now):
                self._ask_peer(now, node, index, peer, Asked(lane, peer.number, now, size))
                return
        node.asked[index] = Asked(lane, MIRROR, now, size)
        self._read_mirror(now, node, index, size)

    def _holders(self, now: float, node: Node, index: int, owners: tuple[str, ...]) -> list[str]:
        """Of some that are asked only for what they hold, those who do. The others' answers take no time here."""
        owner = self._owners[index][0]
        if owners[:1] == (owner,):
            return []
        others = ahead(self.placement.members, owner, node.name)
        others = tuple(name for name in others if not (name in owners or node.standing.is_avoided(name, now)))
        lot = self._lots.sample(others, min(HOLDERS_ASKED, len(others)))
        return [name for name in lot if self.by_name[name].is_alive and self.by_name[name].held[index]]

    def _read_mirror(self, now: float, node: Node, index: int, size: int) -> None:
        """Unless it is being read: one read of a chunk at a time on one node."""
        if index in node.reading:
            return
        node.reading[index] = now
        self.origin_bytes += size
        self.links.send(now, (node.number, index, MIRROR), size)
        self._expect(now)

    def _ask_peer(self, now: float, node: Node, index: int, peer: Node, asked: Asked) -> None:
        node.asked[index] = asked
        if not peer.is_alive:
            self._at(now + DEAD_SECONDS, self._failed, node, index, asked)
        elif peer.held[index]:
            self._serve(now, node, index, asked)
            if asked.arrives > now + LOOK_SECONDS:
                self._at(now + LOOK_SECONDS, self._look, node, index, asked)
        else:
            self._at(now + LOOK_SECONDS, self._look, node, index, asked)
            peer.parked.setdefault(index, []).append((node, asked))
            self._obtain(now, peer, index)

    def _obtain(self, now: float, node: Node, index: int) -> None:
        """What peers ask for is never asked of another peer; and not more of it at once than of the node's own."""
        if index in node.reading:
            return
        if len(node.obtaining) < node.slots[OWN]:
            node.obtaining.add(index)
            self._read_mirror(now, node, index, CHUNK_SIZE)
        else:
            node.to_obtain.append(index)

    def _obtained(self, now: float, node: Node, index: int) -> None:
        node.obtaining.discard(index)
        while node.to_obtain and len(node.obtaining) < node.slots[OWN]:
            following = node.to_obtain.popleft()
            if not node.held[following]:
                self._obtain(now, node, following)

    def _serve(self, now: float, node: Node, index: int, asked: Asked) -> None:
        asked.began = self._now = now
        if asked.patience is not None:
            asked.patience.receiving(0)
        arrives = self.links.send(now, (node.number, index, asked.source), asked.size)
        if arrives is None:
            self._expect(now)
        else:
            asked.arrives = arrives + LATENCY_SECONDS
            self._at(asked.arrives, self._arrived, node, index, asked)

    def _look(self, now: float, node: Node, index: int, asked: Asked) -> None:
        """What the agent's patience says to a request that is not over at once."""
        if node.asked.get(index) is not asked or not node.is_alive:
            return
        if asked.patience is None:
            asked.patience = self._patience(node, asked)
        self._now = now
        missing = self._missing(now, node, index, asked)
        try:
            if asked.began is None:
                asked.patience.at_work()  # says an owner that waits for the mirror
                asked.patience.waiting()
            else:
                asked.patience.receiving(asked.size - missing - asked.seen)
                asked.seen = asked.size - missing
        except LateError as late:
            node.retries += bool(late.failure)
            (node.heads if asked.began is None else node.bodies).left()
            node.standing.blame(self.nodes[asked.source].name, Fault.SLOW, now)
            self._move(now, node, index, asked, missing)
        else:
            self._at(now + LOOK_SECONDS, self._look, node, index, asked)

    def _patience(self, node: Node, asked: Asked) -> SourceDeadline:
        """As it would be had it been there from the beginning: most requests are over before anybody looks."""
        name = self.nodes[asked.source].name
        self._now = asked.asked
        alternative = Alternative(
            lambda: self._limits(node, asked),
            node.hedges.spend,
            lambda: node.standing.is_at_fault(name, self._now),
        )
        patience = SourceDeadline.of_peer(asked.size, NEVER, alternative, lambda: self._now)
        if asked.began is not None:
            self._now = asked.began
            patience.receiving(0)
        return patience

    def _limits(self, node: Node, asked: Asked) -> Limits:
        waits = [
            (self.nodes[one.source].name, self._now - one.asked)
            for one in node.asked.values()
            if one.source >= 0 and one.source != asked.source and one.began is None
        ]
        head = node.heads.unless_shared(node.heads.deadline(0), waits, len(self.placement.members) - 2)
        return Limits(head, node.bodies.deadline(asked.size), node.bodies.usual(asked.size))

    def _failed(self, now: float, node: Node, index: int, asked: Asked) -> None:
        if node.asked.get(index) is not asked or not node.is_alive:
            return
        node.retries += 1
        node.standing.blame(self.nodes[asked.source].name, Fault.FAILED, now)
        self._move(now, node, index, asked, self._missing(now, node, index, asked))

    def _missing(self, now: float, node: Node, index: int, asked: Asked) -> int:
        if asked.began is None:
            return asked.size
        return min(asked.size, self.links.missing(now, (node.number, index, asked.source), asked.arrives))

    def _move(self, now: float, node: Node, index: int, asked: Asked, missing: int) -> None:
        """The rest of it comes another way."""
        self._end(now, node, index)
        if asked.began is None:
            waiting = self.nodes[asked.source].parked.get(index, [])
            waiting[:] = [one for one in waiting if one[1] is not asked]
        else:
            self.links.cancel(now, (node.number, index, asked.source), missing)
            self._expect(now)
        self._ask(now, node, index, asked.lane, missing)

    # What comes.

    def _expect(self, now: float) -> None:
        """Something began or ended: look again when something arrives, once for all that happens at this moment."""
        if self._expected_at != now:
            self._expected_at = now
            self._at(now, self._schedule)

    def _schedule(self, now: float) -> None:
        self._expected_at = -1.0
        when = self.links.next_tick(now)
        self._ticks += 1
        if when is not None:
            self._at(when, self._tick, self._ticks)

    def _tick(self, now: float, number: int) -> None:
        if number != self._ticks:
            return
        for at, (target, index, source) in self.links.arrived(now):
            node = self.nodes[target]
            if source == MIRROR:
                self._at(at, self._read, node, index)
            elif index in node.asked:
                self._at(at + LATENCY_SECONDS, self._arrived, node, index, node.asked[index])
        self._expect(now)

    def _read(self, now: float, node: Node, index: int) -> None:
        """It came from the mirror, for whoever waits for it here."""
        since = node.reading.pop(index)
        if not node.is_alive:
            return
        asked = node.asked.get(index)
        if asked is None or asked.size == CHUNK_SIZE:
            node.heads.came(0, now - since)
            node.bodies.came(CHUNK_SIZE, now - since)
        node.held[index] = 1
        if asked is None:
            self._fill(now, node, index)
        elif asked.source == MIRROR:
            self._filled(now, node, index, asked.lane)
        self._serve_waiting(now, node, index)
        self._obtained(now, node, index)

    def _arrived(self, now: float, node: Node, index: int, asked: Asked) -> None:
        """It came from a peer."""
        if node.asked.get(index) is not asked or not node.is_alive or asked.began is None:
            return
        node.standing.succeeded(self.nodes[asked.source].name, now)
        node.heads.came(0, asked.began - asked.asked)
        node.bodies.came(asked.size, now - asked.began)
        node.held[index] = 1
        self._filled(now, node, index, asked.lane)
        self._serve_waiting(now, node, index)

    def _filled(self, now: float, node: Node, index: int, lane: int) -> None:
        self._end(now, node, index)
        self._fill(now, node, index)
        self._next(now, node, lane)

    def _end(self, now: float, node: Node, index: int) -> None:
        """End a request. The chunks that wait for a place at its source are asked for again."""
        asked = node.asked.pop(index, None)
        for waiting, one in node.waiting.pop(asked.source, ()) if asked is not None else ():
            if node.asked.get(waiting) is one:
                del node.asked[waiting]
                self._ask(now, node, waiting, one.lane, one.size)

    def _fill(self, now: float, node: Node, index: int) -> None:
        if node.filled[index]:
            return
        node.filled[index] = 1
        node.left -= 1
        if not node.left:
            node.finished_at = now

    def _serve_waiting(self, now: float, node: Node, index: int) -> None:
        for waiting, asks in node.parked.pop(index, ()):
            if waiting.asked.get(index) is asks:
                self._serve(now, waiting, index, asks)

    def _kill(self, now: float, node: Node) -> None:
        """Its connections are reset."""
        node.is_alive = False
        for index, asked in list(node.asked.items()):
            if asked.began is not None:
                self.links.cancel(now, (node.number, index, asked.source), asked.size)
        for index in node.reading:
            self.links.cancel(now, (node.number, index, MIRROR), CHUNK_SIZE)
        self._expect(now)
        for other in self.survivors:
            for index, asked in list(other.asked.items()):
                if asked.source == node.number:
                    self._at(now, self._failed, other, index, asked)
