"""A cluster that stages one manifest on simulated links, with the real rules: placement, lanes, routes, deadlines, standing.

Nothing here decides: it carries out what ``bdn.core`` says, as the agent does, and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.hedging import Deadlines, HedgeBudget
from bdn.core.lanes import lanes, own_in_flight
from bdn.core.peer_standing import Fault, PeerStanding
from bdn.core.placement import Placement
from bdn.core.routes import OWNERS_LOOKED_AT, route
from tests.support.names import named
from tests.support.simulated_links import MIRROR, Links, QueuedLinks

LATENCY_SECONDS: Final = 0.0005
PATIENCE_SECONDS: Final = 30.0  # with a source that is late when no more may be asked for twice
DEAD_SECONDS: Final = 2.0  # until a request to a machine that is gone has failed
OWN, PEERS, FOR_OTHERS = 0, 1, 2


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
        return self.chunks * CHUNK_SIZE / min(self.rate, self.mirror_rate)


@dataclass
class Asked:
    """A chunk on its way to a node."""

    lane: int
    source: int
    asked: float
    size: int = CHUNK_SIZE
    began: float | None = None  # its answer
    arrives: float = 0.0


class Node:
    def __init__(self, number: int, case: Case) -> None:
        self.number = number
        self.name = f"node-{number:04}"
        self.held = bytearray(case.chunks)
        self.left = case.chunks
        self.orders: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.positions = [0, 0]
        self.idle = [0, 0]
        self.slots = (1, 1)
        self.asked: dict[int, Asked] = {}
        self.parked: dict[int, list[int]] = {}  # by chunk, who waits for it here
        self.waits = Deadlines(first=20.0, shortest=3.0, longest=60.0)  # until an answer begins
        self.deadlines = Deadlines()  # and from there to its end
        self.standing = PeerStanding()
        self.hedges = HedgeBudget(case.chunks * CHUNK_SIZE)
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
        self.origin_at: list[tuple[float, int]] = []
        self.done_in: dict[int, int] = {}  # chunks that nodes got, by whole second per cent of the time of a node alone
        self._tick_seconds = case.alone_seconds / 100
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = count()
        self._ticks = 0
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

    def _at(self, when: float, act: Callable[..., None], *facts: object) -> None:
        heappush(self._agenda, (when, next(self._number), act, facts))

    # Members and their orders.

    def _place(self, now: float) -> None:
        """The members of this moment, for chunks that nobody has begun."""
        members = [node.name for node in self.nodes if self.case.joins.get(node.number, 0.0) <= now]
        self._placement = Placement(self.chunks, members)
        self._owners = [self._placement.owners(index, OWNERS_LOOKED_AT) for index in range(len(self.chunks))]
        for node in self.nodes:
            if node.orders != ((), ()) and node.is_alive:
                self._order(node)

    def _order(self, node: Node) -> None:
        order = lanes(self._placement, node.name)
        node.orders, node.positions = (order.own, order.peers), [0, 0]
        node.slots = (own_in_flight(len(self._placement.members), self.case.in_flight), self.case.in_flight)

    def _start(self, now: float, node: Node) -> None:
        self._order(node)
        for lane in (OWN, PEERS):
            for _ in range(node.slots[lane]):
                self._next(now, node, lane)

    def _next(self, now: float, node: Node, lane: int) -> None:
        """A slot of the lane is free."""
        order, position = node.orders[lane], node.positions[lane]
        while position < len(order):
            index = order[position]
            position += 1
            if not node.held[index] and index not in node.asked:
                node.positions[lane] = position
                self._ask(now, node, index, lane, CHUNK_SIZE)
                return
        node.positions[lane] = position

    # One chunk.

    def _ask(self, now: float, node: Node, index: int, lane: int, size: int) -> None:
        standing = node.standing
        for name in route(self._owners[index], node.name, lambda peer: standing.is_avoided(peer, now)):
            if standing.claim(name, now):
                self._ask_peer(now, node, index, self.by_name[name], Asked(lane, self.by_name[name].number, now, size))
                return
        node.asked[index] = Asked(lane, MIRROR, now, size)
        self._read_origin(now, node, index, size)

    def _read_origin(self, now: float, node: Node, index: int, size: int) -> None:
        self.origin_bytes += size
        self.origin_at.append((now, size))
        self.links.send(now, (node.number, index, MIRROR), size)
        self._expect(now)

    def _ask_peer(self, now: float, node: Node, index: int, peer: Node, asked: Asked) -> None:
        node.asked[index] = asked
        if not peer.is_alive:
            self._at(now + DEAD_SECONDS, self._failed, node, index, asked)
        elif peer.held[index]:
            self._serve(now + LATENCY_SECONDS, node, index, asked)
        else:
            self._at(now + node.waits.deadline(0), self._late, node, index, asked, node.waits)
            peer.parked.setdefault(index, []).append(node.number)
            here = peer.asked.get(index)
            if here is None:
                peer.asked[index] = Asked(FOR_OTHERS, MIRROR, now)
                self._read_origin(now, peer, index, CHUNK_SIZE)
            elif here.source != MIRROR:  # it asks a peer itself, and requests of peers are not forwarded
                self._leave(now, peer, index, here)
                peer.asked[index] = Asked(FOR_OTHERS, MIRROR, now)
                self._read_origin(now, peer, index, CHUNK_SIZE)

    def _leave(self, now: float, node: Node, index: int, asked: Asked) -> None:
        """The chunk will come another way: its slot is free."""
        source = self.nodes[asked.source]
        if node.number in source.parked.get(index, ()):
            source.parked[index].remove(node.number)
        if asked.lane != FOR_OTHERS:
            self._at(now, self._next, node, asked.lane)

    def _serve(self, now: float, node: Node, index: int, asked: Asked) -> None:
        asked.began = now
        arrives = self.links.send(now, (node.number, index, asked.source), asked.size)
        if arrives is None:
            self._expect(now)
            return
        asked.arrives = arrives
        deadline = now + node.deadlines.deadline(asked.size)
        if arrives > deadline:
            self._at(deadline, self._late, node, index, asked, node.deadlines)
        else:
            self._at(arrives, self._arrived, node, index, asked)

    def _late(self, now: float, node: Node, index: int, asked: Asked, deadlines: Deadlines) -> None:
        """A deadline, of the wait or of the bytes: the rest is asked for elsewhere, if the budget allows."""
        is_of_the_wait = deadlines is node.waits
        if node.asked.get(index) is not asked or not node.is_alive or (is_of_the_wait and asked.began is not None):
            return
        rate = self.case.rate / self.case.slow.get(asked.source, 1.0)
        rest = asked.size if is_of_the_wait else min(asked.size, int((asked.arrives - now) * rate) + 1)
        if not node.hedges.take(rest):
            self._at(now + PATIENCE_SECONDS, self._failed, node, index, asked)
            if not is_of_the_wait:
                self._at(asked.arrives, self._arrived, node, index, asked)
            return
        deadlines.left()
        node.standing.blame(self.nodes[asked.source].name, Fault.SLOW, now)
        if not is_of_the_wait:
            self.links.cancel(now, asked.source, rest)
        self._ask(now, node, index, asked.lane, rest)

    def _failed(self, now: float, node: Node, index: int, asked: Asked) -> None:
        if node.asked.get(index) is not asked or not node.is_alive:
            return
        node.standing.blame(self.nodes[asked.source].name, Fault.FAILED, now)
        self._ask(now, node, index, asked.lane, CHUNK_SIZE)

    def _expect(self, now: float) -> None:
        when = self.links.next_tick(now)
        self._ticks += 1
        if when is not None:
            self._at(when, self._tick, self._ticks)

    def _tick(self, now: float, number: int) -> None:
        if number != self._ticks:
            return
        for at, (target, index, source) in self.links.arrived(now):
            asked = self.nodes[target].asked.get(index)
            if asked is not None and asked.source == source:
                self._at(at, self._arrived, self.nodes[target], index, asked)
        self._expect(now)

    def _arrived(self, now: float, node: Node, index: int, asked: Asked) -> None:
        if node.asked.get(index) is not asked or not node.is_alive:
            return
        if asked.source != MIRROR:
            if not self.nodes[asked.source].is_alive:
                return  # the failure is on its way
            node.standing.succeeded(self.nodes[asked.source].name, now)
            node.deadlines.came(asked.size, now - (asked.began or now))
        del node.asked[index]
        node.held[index] = 1
        node.left -= 1
        bucket = int(now / self._tick_seconds)
        self.done_in[bucket] = self.done_in.get(bucket, 0) + 1
        if not node.left:
            node.finished_at = now
        for waiting in node.parked.pop(index, ()):
            asks = self.nodes[waiting].asked.get(index)
            if asks is not None and asks.source == node.number:
                self.nodes[waiting].waits.came(0, now - asks.asked)
                self._serve(now + LATENCY_SECONDS, self.nodes[waiting], index, asks)
        if asked.lane != FOR_OTHERS:
            self._next(now, node, asked.lane)

    def _kill(self, now: float, node: Node) -> None:
        node.is_alive = False
        for other in self.survivors:
            for index, asked in list(other.asked.items()):
                if asked.source == node.number:
                    self._at(now, self._failed, other, index, asked)
