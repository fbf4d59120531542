"""In which order a node asks for the chunks of a manifest: those that it owns, and those of its peers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, zip_longest
from math import ceil

from xxhash import xxh3_64_intdigest

from bdn.core.ring.placement import Placement


@dataclass(frozen=True, slots=True)
class Lanes:
    """Indices of chunks. The lanes are worked through at the same time, each from its beginning.

    own: what this node reads from the mirror, in the order of the manifest. Everything, in a cluster without members.
    peers: what its peers own, in rounds.
    """

    own: tuple[int, ...]
    peers: tuple[int, ...]


def lanes(placement: Placement, me: str) -> Lanes:
    """The order for the node ``me``, which owns nothing when it is no member.

    A round has the next chunk of every owner. Owners read theirs from the mirror in that order, so that a round is there at
    the same time. In a round each node begins with the owner that comes after itself in the circle of members, so that no
    two members ask the same owner at the same time. If all asked in the order of the manifest, as many owners would be busy
    as a node has requests in flight, and a thousand nodes would have the bandwidth of sixteen.

    That a peer is avoided changes the route of its chunks (``bdn.core.ring.routes``) and not their place in the order.
    """
    members = placement.members
    if not members:
        return Lanes(tuple(range(len(placement))), ())
    rank = members.index(me) if me in members else None
    start = xxh3_64_intdigest(me.encode()) % len(members) if rank is None else rank
    circle = [*range(start, len(members)), *range(start)]
    rounds = zip_longest(*(placement.owned[owner] for owner in circle if owner != rank))
    peers = tuple(index for index in chain.from_iterable(rounds) if index is not None)
    return Lanes(() if rank is None else placement.owned[rank], peers)


def own_in_flight(members: int, most: int) -> int:
    """How many chunks of its own a node reads at once from the mirror, so that all members together read about ``most``.

    The mirror's link is shared by everything that is in flight. Many chunks at a time all come late, and nobody can pass on
    what has not come: the fewer there are, the sooner the first is in the cluster.
    """
    return max(1, ceil(most / max(1, members)))
