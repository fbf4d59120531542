"""The two lanes of a stage: what this node reads from the mirror, and what it asks its peers for.

Each has threads of its own, so that waiting for peers never keeps a node from reading what its peers wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.ring.routes import own_in_flight
from bdn.transfer.byte_threads import ByteThreads
from node_agent.fetch.bandwidth import OrderedLimit, Position


@dataclass(frozen=True)
class Pools:
    """The agent's byte threads, which all stages share: for chunks from the mirror, and for those from peers.

    ``origin`` are the places to read from the mirror, for stages and for what peers ask for: more at once from this node
    would come no sooner, and what its peers wait for would come later.
    """

    own: ByteThreads
    peers: ByteThreads
    origin: OrderedLimit


@dataclass(frozen=True, eq=False)
class Lane:
    """Some of a stage's chunks."""

    threads: ByteThreads
    places: OrderedLimit

    @property
    def width(self) -> int:
        """How many chunks are in hand at once, at most."""
        return min(self.threads.count, self.places.limit)

    @property
    def is_ending(self) -> bool:
        """Whether all chunks that are left are in hand. Any thread may ask."""
        return self.places.is_last

    def turn(self, position: Position) -> AbstractAsyncContextManager[None]:
        """To be held while a chunk is in hand."""
        return self.places.place(position)


Place = tuple[Lane, Position]  # where a chunk is to be fetched, and when
PlaceOf = Callable[[Digest], Place]


class Lanes:
    """One stage's lanes, among ``members`` who share the reading. A node that is alone uses only one."""

    def __init__(self, pools: Pools, members: int) -> None:
        pools.origin.limit = own_in_flight(members, pools.own.count)
        self.own = Lane(pools.own, pools.origin)
        self.peers = Lane(pools.peers, OrderedLimit(pools.peers.count))
