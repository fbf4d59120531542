"""The two lanes of a stage: what this node reads from the mirror, and what it asks its peers for.

Each has threads of its own, so that waiting for peers never keeps a node from reading what its peers wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.lanes import own_in_flight
from bdn.transfer.byte_threads import ByteThreads
from node_agent.fill.turns import Position, Turns


@dataclass(frozen=True)
class Pools:
    """The agent's byte threads, which all stages share: for chunks from the mirror, and for those from peers."""

    own: ByteThreads
    peers: ByteThreads


@dataclass(frozen=True, eq=False)
class Lane:
    """Some of a stage's chunks. Without ``turns``, whoever comes first is first."""

    threads: ByteThreads
    turns: Turns | None

    @property
    def width(self) -> int:
        """How many chunks are in hand at once, at most."""
        return min(self.threads.count, self.turns.limit) if self.turns else self.threads.count

    def turn(self, position: Position) -> AbstractAsyncContextManager[None]:
        """To be held while a chunk is in hand."""
        return self.turns.take(position) if self.turns else nullcontext()


Place = tuple[Lane, Position]  # where a chunk is to be fetched, and when
PlaceOf = Callable[[Digest], Place]


class Lanes:
    """One stage's lanes, among ``members`` who share the reading. A node that is alone has one, and no order in it."""

    def __init__(self, pools: Pools, members: int) -> None:
        most = pools.own.count
        self.own = Lane(pools.own, Turns(own_in_flight(members, most)) if members > 1 else None)
        self.peers = Lane(pools.peers, Turns(pools.peers.count))
