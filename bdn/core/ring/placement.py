"""Who owns which chunk of a manifest in a cluster: rendezvous hashing with a bound on everybody's load.

Each agent computes it alone, from the same manifest and the same members, and comes to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from itertools import repeat
from math import ceil
from typing import Final

from xxhash import xxh3_64_intdigest

from bdn.core.digest import Digest

_LOAD_BOUND: Final = 1.05


class Placement:
    """The owners of ``chunks``, the distinct chunks of one manifest in the order that all members agree on.

    A chunk belongs to the member with the highest score, xxh3-64 of the digest seeded by the member; where that member has
    its full share already, to the next. A share is at most ``load_bound`` times the average over the whole manifest, rounded
    up. The order of ``members`` plays no part, and a member that is named twice counts once.

    It never changes and may be used by several threads. Making it costs 50 to 100 ns for each pair of chunk and member: 15
    ms for 140 GB on 8 nodes and 1.2 s on 1,000, which is too much for an event loop.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); the bound after Mirrokni, Thorup
    and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), but over the whole manifest: a bound that follows the
    average so far moves chunks from one owner to another whenever a member comes or goes, and evens out nothing that the
    order of the lanes (``bdn.core.ring.routes``) leaves uneven.
    """

    def __init__(self, chunks: Sequence[Digest], members: Sequence[str], *, load_bound: float = _LOAD_BOUND) -> None:
        if load_bound < 1:
            msg = f"a load bound under 1 leaves chunks without an owner: {load_bound}"
            raise ValueError(msg)
        self.members = tuple(sorted(set(members)))
        self._chunks = tuple(chunk.to_bytes() for chunk in chunks)
        self._seeds = [xxh3_64_intdigest(member.encode()) for member in self.members]
        self.share = ceil(load_bound * len(self._chunks) / len(self.members)) if self.members else 0
        self._owners = self._assign() if self.members else []
        owned: list[list[int]] = [[] for _ in self.members]
        for index, owner in enumerate(self._owners):
            owned[owner].append(index)
        self.owned = tuple(map(tuple, owned))  # by each member: its chunks, in their order

    def __len__(self) -> int:
        return len(self._chunks)

    def owner(self, index: int) -> str | None:
        """Who owns the chunk with this index; None in a cluster without members."""
        return self.members[self._owners[index]] if self.members else None

    def owners(self, index: int, count: int) -> tuple[str, ...]:
        """The owner first and then those who would come next by their score, at most ``count`` and nobody twice."""
        if not self.members or count < 1:
            return ()
        owner = self._owners[index]
        scores = self._scores(self._chunks[index])
        best = nlargest(count, range(len(scores)), key=scores.__getitem__)
        ranks = [owner, *(rank for rank in best if rank != owner)]
        return tuple(self.members[rank] for rank in ranks[:count])

    def _assign(self) -> list[int]:
        owners = []
        loads = [0] * len(self.members)
        for chunk in self._chunks:
            scores = self._scores(chunk)
            owner = scores.index(max(scores))
            if loads[owner] >= self.share:
                free = (rank for rank, load in enumerate(loads) if load < self.share)
                owner = max(free, key=scores.__getitem__)
            loads[owner] += 1
            owners.append(owner)
        return owners

    def _scores(self, chunk: bytes) -> list[int]:
        return list(map(xxh3_64_intdigest, repeat(chunk), self._seeds))
