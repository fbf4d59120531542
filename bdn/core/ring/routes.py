"""Where one chunk is asked for: its owner, who may have it from the owner, the next owner, the mirror."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

OWNERS_LOOKED_AT: Final = (
    4  # ask ``Placement.owners`` for so many: with a third avoided, 99 of 100 chunks have a peer left
)
HOLDERS_ASKED: Final = 4  # of those ``ahead`` of us: cheap questions, and most of them have it when an owner is late
_PEERS_ASKED: Final = 3  # the owner may be dead, and the next one slow


def route(owners: Iterable[str], me: str, is_avoided: Callable[[str], bool]) -> tuple[str, ...]:
    """The peers that the node ``me`` asks for one chunk, in this order; after them, or alone, the mirror.

    Whoever finds itself on the way reads from the mirror: it is the owner for everybody who comes after, and nobody asks a
    peer for what it is to obtain for others. So requests between peers never go round in a circle.

    Args:
        owners: the owner and those who would be next, from ``Placement.owners``.
        me: this node's name, whether it is a member or not.
        is_avoided: whether a peer is out of favour just now (``bdn.core.ring.peer_standing``).
    """
    peers: list[str] = []
    for owner in owners:
        if owner == me or len(peers) == _PEERS_ASKED:
            break
        if not is_avoided(owner):
            peers.append(owner)
    return tuple(peers)


def ahead(members: Sequence[str], owner: str, me: str) -> tuple[str, ...]:
    """The members that ask ``owner`` for a chunk before the node ``me`` does, by the order of ``bdn.core.ring.lanes``.

    They are the first to hold what it owns. None where one of the two is no member, or both are one.
    """
    if owner == me or owner not in members or me not in members:
        return ()
    first, stop = members.index(me) + 1, members.index(owner)
    circle = [*members[first:], *members[:first]]
    return tuple(circle[: (stop - first) % len(members)])
