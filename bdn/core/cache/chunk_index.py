"""What a cluster tier holds: single chunks under the manifests for which they were asked. Every rule of it, and no I/O.

Unlike a node's cache it never needs a manifest whole: an owner holds its share of the chunks, and takes them in one by one.
They go in whole manifests, least recently used first. Methods change the state and return the I/O that is now to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bdn.core.cache.index import EvictionPlan, Victim
from bdn.core.cache.ledger import SpaceLedger
from bdn.core.cache.recency import RecencyOrder
from bdn.core.digest import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError

IN_USE_SECONDS: Final = 60.0  # as long as that after its last use, others of the cluster are likely to want more of it


@dataclass(frozen=True, slots=True)
class Room:
    """What to do for a chunk that was let in: delete the victims; then bring it, unless it is here under another name."""

    victims: tuple[Victim, ...] = ()
    is_new: bool = True


class ChunkIndex:
    """The state of one cluster tier. Times are seconds since the epoch; sizes and budgets are bytes."""

    def __init__(self) -> None:
        self.ledger = SpaceLedger()
        self.recency = RecencyOrder()
        self._chunks: dict[Digest, set[Digest]] = {}  # manifest -> chunks, held or on their way
        self._named_by: dict[Digest, set[Digest]] = {}  # chunk -> manifests

    # --- letting in ---

    def reserve(self, manifest: Digest, chunk: Digest, size: int, *, now: float, budget: int) -> Room:
        """Room for a chunk of a manifest; of the manifests that nobody uses now, the least recently used make it.

        A chunk that is counted already, whole or on its way, needs none: the manifest names it from now on, too.

        Raises:
            CacheTooSmallError: the chunk could not fit an empty tier of this budget. Nothing changed.
            CacheFullError: what is in use leaves no room now. Nothing changed.
        """
        if self.ledger.size_of(chunk) is not None:
            self._name(manifest, chunk, now)
            return Room(is_new=False)
        if size > budget:
            raise CacheTooSmallError(size, budget)
        victims = self._make_room(manifest, size, now, budget)
        for victim in victims:
            self._forget(victim.manifest)
        self.ledger.reserve(chunk, size)
        self._name(manifest, chunk, now)
        return Room(victims)

    def commit(self, chunk: Digest) -> frozenset[Digest]:
        """The chunk is on disk; returns who names it. Nobody does when all were evicted meanwhile: then it must go again."""
        names = self.named_by(chunk)
        if names:
            self.ledger.commit(chunk)
        else:
            self.ledger.release(chunk)
        return names

    def lose(self, chunk: Digest) -> frozenset[Digest]:
        """The chunk is not here (any more): it did not come, it rots, or a whole file has it. Returns who named it."""
        names = frozenset(self._named_by.pop(chunk, ()))
        for manifest in names:
            self._chunks[manifest].discard(chunk)
            if not self._chunks[manifest]:
                del self._chunks[manifest]
                self.recency.forget(manifest)
        self.ledger.release(chunk)
        return names

    def restore(self, manifest: Digest, chunks: Mapping[Digest, int], *, last_used: float) -> None:
        """Count what a start-up scan found."""
        for chunk, size in chunks.items():
            if self.ledger.size_of(chunk) is None:
                self.ledger.reserve(chunk, size)
                self.ledger.commit(chunk)
            self._name(manifest, chunk, last_used)

    # --- taking out ---

    def plan(self, manifests: Iterable[Digest], *, force: bool = False) -> EvictionPlan:  # noqa: ARG002 - CacheIndex's
        """What evicting these manifests would take. Unknown ones are passed over, nothing is refused. Changes nothing."""
        gone: set[Digest] = set()
        victims: list[Victim] = []
        for manifest in dict.fromkeys(manifests):
            if manifest in self._chunks:
                gone.add(manifest)
                victims.append(self._victim(manifest, gone))
        return EvictionPlan(tuple(victims), ())

    def plan_lru(self, size: int, *, force: bool = False) -> EvictionPlan:  # noqa: ARG002 - likewise
        """Least recently used manifests until ``size`` bytes are freed, or all. Changes nothing."""
        gone: set[Digest] = set()
        victims: list[Victim] = []
        for manifest in self.recency.oldest_first():
            if size <= 0:
                break
            gone.add(manifest)
            victims.append(self._victim(manifest, gone))
            size -= victims[-1].size
        return EvictionPlan(tuple(victims), ())

    def evict(self, plan: EvictionPlan) -> None:
        """Carry a plan out on the state; the caller deletes afterwards. Chunks on their way stay counted until they end."""
        for victim in plan.victims:
            self._forget(victim.manifest)

    # --- looking ---

    def knows(self, manifest: Digest) -> bool:
        """Whether it has a chunk here, or on its way."""
        return manifest in self._chunks

    def manifests(self) -> tuple[Digest, ...]:
        """Manifests with a chunk here, least recently used first."""
        return tuple(self.recency.oldest_first())

    def size_of(self, manifest: Digest) -> int:
        """The bytes of a manifest's chunks here; 0 when it has none."""
        return sum(self.ledger.size_of(chunk) or 0 for chunk in self._chunks.get(manifest, ()))

    def named_by(self, chunk: Digest) -> frozenset[Digest]:
        """The manifests that name this chunk, whether it is whole or on its way."""
        return frozenset(self._named_by.get(chunk, ()))

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The chunks of a manifest that are whole here; none when it has none."""
        return frozenset(one for one in self._chunks.get(manifest, ()) if self.ledger.is_committed(one))

    def committed(self) -> tuple[Digest, ...]:
        """Every chunk that is whole here."""
        return tuple(chunk for chunk in self._named_by if self.ledger.is_committed(chunk))

    # --- inside ---

    def _make_room(self, manifest: Digest, size: int, now: float, budget: int) -> tuple[Victim, ...]:
        over = self.ledger.used_bytes + size - budget
        gone: set[Digest] = set()
        victims: list[Victim] = []
        for oldest in self.recency.oldest_first():
            if over <= 0 or self._is_in_use(oldest, now):  # whatever comes after it was used later still
                break
            if oldest != manifest:
                gone.add(oldest)
                victims.append(self._victim(oldest, gone))
                over -= victims[-1].size
        if over > 0:
            free = max(0, budget - self.ledger.used_bytes)
            in_use = sum(self.size_of(one) for one in self._chunks if one == manifest or self._is_in_use(one, now))
            raise CacheFullError(size, free, in_use, budget)
        return tuple(victims)

    def _is_in_use(self, manifest: Digest, now: float) -> bool:
        return now - self.recency.last_used(manifest) < IN_USE_SECONDS

    def _victim(self, manifest: Digest, gone: set[Digest]) -> Victim:
        chunks = tuple(
            chunk
            for chunk in self._chunks[manifest]
            if self._named_by[chunk] <= gone and self.ledger.is_committed(chunk)
        )
        return Victim(manifest, chunks, sum(self.ledger.size_of(chunk) or 0 for chunk in chunks))

    def _name(self, manifest: Digest, chunk: Digest, now: float) -> None:
        self._chunks.setdefault(manifest, set()).add(chunk)
        self._named_by.setdefault(chunk, set()).add(manifest)
        self.recency.touch(manifest, now)

    def _forget(self, manifest: Digest) -> None:
        for chunk in self._chunks.pop(manifest):
            names = self._named_by[chunk]
            names.discard(manifest)
            if not names:
                del self._named_by[chunk]
                if self.ledger.is_committed(chunk):
                    self.ledger.release(chunk)
        self.recency.forget(manifest)
