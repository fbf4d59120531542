"""The cluster tier of one agent: the chunks that it holds for its peers, within a budget of their own."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from bdn.core.cache.index import ChunkIndex, EvictionPlan, EvictionReason, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.core.events import Event
from node_agent.cache.cache_events import Account, CacheEvents, kept, over_budget
from node_agent.cache.chunk_files import ChunkFiles

logger = logging.getLogger(__name__)
_TOUCH_SECONDS: Final = 30.0  # between two notes on disk about a manifest's use: what a kill costs LRU order


@dataclass(frozen=True)
class ClusterTier:
    """The rules of ``ChunkIndex``, carried out on disk. All methods may be called from any thread, and block.

    One lock is held while the index changes and victims are deleted, so that nobody is given room that is still full, or
    brings back a chunk that is about to be deleted. Whoever opens a chunk does not take it: a peer never waits for a
    deletion, and a file that is open stays readable when it is evicted. What a failing disk does not delete is counted again.

    ``budget`` says in bytes what may be held now; ``events`` are told in the caller's thread.
    """

    files: ChunkFiles
    index: ChunkIndex
    budget: Callable[[], int]
    clock: Callable[[], float]
    events: CacheEvents
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _used: dict[Digest, float] = field(default_factory=dict)  # uses that the index has not heard of
    _noted: dict[Digest, float] = field(default_factory=dict)  # uses that the disk has heard of

    def load(self) -> None:
        """Count what is on disk. Before anything else."""
        for found in sorted(self.files.scan(), key=lambda one: one.last_used):
            self.index.restore(found.manifest, found.chunks, last_used=found.last_used)

    # --- reading ---

    def open(self, chunk: Digest) -> BinaryIO | None:
        """The chunk's file, which the caller closes; None when it is not held. The manifests that name it are in use."""
        names = self.index.named_by(chunk)
        for manifest in names:
            file = self.files.open(manifest, chunk)
            if file is not None:
                for name in names:
                    self._touch(name)
                return file
        if self.holds(chunk):
            self._check(chunk)
        return None

    def holds(self, chunk: Digest) -> bool:
        """Whether the chunk is whole here, as far as we know."""
        return self.index.ledger.is_committed(chunk)

    def manifests(self) -> tuple[Digest, ...]:
        """The manifests of which some chunk is here or on its way."""
        with self._lock:
            return self.index.manifests()

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The chunks that are whole here for a manifest. Nobody uses them for that."""
        with self._lock:
            return self.index.chunks_of(manifest)

    # --- taking in ---

    def bring(self, manifest: Digest, chunk: Digest, buffer: memoryview, read: Callable[[memoryview], object]) -> bool:
        """Make room for a chunk, read it into ``buffer``, which is as long, and hold it.

        False when it was not read: it is here already, or another call brings it, and the manifest only names it as well.

        Raises:
            CacheTooSmallError, CacheFullError: nothing was read.
            BdnError: what ``read`` raises, or DISK_FAILED. The room is free again.
        """
        with self._lock:
            self._hear_of_uses()
            is_new, last_used, budget = not self.index.holds(manifest), self._last_used(), self.budget()
            admission = self.index.admit(manifest, chunk, len(buffer), now=self.clock(), budget=budget)
            if not admission.missing:
                self._link(chunk, manifest)
                return False
            decisions = [_made_room(victim, manifest) for victim in admission.victims]
            try:
                self._delete(admission.victims, "lru", decisions, last_used)
            except BaseException:
                self.index.lose(chunk)
                raise
        try:
            read(buffer)
            aside = self.files.write(buffer)
            with self._lock:  # meanwhile others may have named it, and some or all may have been evicted
                self.files.appear(aside, chunk, self.index.named_by(chunk))
                self.index.commit(chunk)
        except BaseException:
            self.lose(chunk)
            raise
        if is_new:
            self.events.changed()
        return True

    def keep(self, manifest: Digest, chunk: Digest, content: memoryview) -> bool:
        """Hold a verified chunk that a fill of this node brought. False when that cannot be: the fill does without."""
        try:
            self.bring(manifest, chunk, content, lambda _: None)
        except (CacheFullError, CacheTooSmallError):
            return False
        except BdnError as error:
            logger.warning("chunk %s is not kept for the cluster: %s", chunk, error)
            return False
        return True

    # --- taking out ---

    def lose(self, chunk: Digest) -> None:
        """Hold the chunk no more: it did not come, or it is not what its name says."""
        with self._lock:
            self.files.remove(self.index.lose(chunk), chunk)

    def drop(self, is_elsewhere: Callable[[Digest], bool]) -> int:
        """Let go of chunks that a whole file of this node has as well; returns how many.

        The same bytes do not lie twice on one disk, and the file serves peers just as well.
        """
        with self._lock:
            covered = [chunk for chunk in self.index.committed() if is_elsewhere(chunk)]
            for chunk in covered:
                self.files.remove(self.index.named_by(chunk), chunk)  # first: what cannot be removed stays counted
                self.index.lose(chunk)
        return len(covered)

    def evict(
        self, plan: Callable[[ChunkIndex], EvictionPlan], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Carry out what ``plan`` decides about the index as it is while nobody else changes it; ``account`` says why.

        Raises:
            DiskFailedError: what could not be deleted is held as before.
        """
        with self._lock:
            self._hear_of_uses()
            decided, last_used = plan(self.index), self._last_used()
            decisions = [account(victim, last_used[victim.manifest]) for victim in decided.victims]
            self.index.evict(decided)
            self._delete(decided.victims, reason, decisions, last_used)
        return decided

    def plan(self, plan: Callable[[ChunkIndex], EvictionPlan]) -> EvictionPlan:
        """What ``evict`` would do now."""
        with self._lock:
            self._hear_of_uses()
            return plan(self.index)

    def trim(self) -> None:
        """Evict what is over the budget: the disk is fuller than it was, or the operator lowered it."""
        held, budget = self.index.ledger.used_bytes, self.budget()
        if held > budget:
            account = over_budget("cluster", held, budget, budget)
            self.evict(lambda index: index.plan_lru(held - budget), "trim", account)

    # --- figures ---

    def held(self) -> dict[Digest, tuple[int, float]]:
        """Bytes and last use by manifest, least recently used first."""
        with self._lock:
            self._hear_of_uses()
            index = self.index
            return {
                manifest: (index.size_of(manifest), index.recency.last_used(manifest)) for manifest in index.manifests()
            }

    # --- inside; the lock is held, except where it says otherwise ---

    def _touch(self, manifest: Digest) -> None:
        """Without the lock: storing into a dictionary is one step under the interpreter's."""
        now = self.clock()
        self._used[manifest] = now
        if now - self._noted.get(manifest, 0) >= _TOUCH_SECONDS:
            self._noted[manifest] = now
            with suppress(BdnError):  # the order of eviction after the next restart is all that is lost
                self.files.touch(manifest, now)

    def _hear_of_uses(self) -> None:
        while self._used:
            manifest, now = self._used.popitem()
            if self.index.holds(manifest):
                self.index.recency.touch(manifest, now)
            else:
                self._noted.pop(manifest, None)

    def _link(self, chunk: Digest, manifest: Digest) -> None:
        """A manifest that names a whole chunk has it in its folder: so it stays when the others go."""
        if not self.holds(chunk):
            return  # on its way: whoever brings it lets it appear for all
        names = self.index.named_by(chunk)
        source = next((name for name in names if name != manifest and self.files.has(name, chunk)), None)
        if source is not None:
            self.files.link(chunk, source, manifest)

    def _check(self, chunk: Digest) -> None:
        """Without the lock: somebody has taken the file away behind our back; the disk wins."""
        with self._lock:
            names = self.index.named_by(chunk)
            if self.holds(chunk) and not any(self.files.has(name, chunk) for name in names):
                logger.warning("chunk %s is not on disk any more", chunk)
                self.index.lose(chunk)

    def _last_used(self) -> dict[Digest, float]:
        return {manifest: self.index.recency.last_used(manifest) for manifest in self.index.manifests()}

    def _delete(
        self,
        victims: Sequence[Victim],
        reason: EvictionReason,
        decisions: Sequence[Event],
        last_used: Mapping[Digest, float],
    ) -> None:
        """The index has forgotten them; ``last_used`` is what it knew before."""
        self.events.decided(decisions)
        count = 0
        try:
            for victim in victims:
                self.files.remove_all(victim.manifest)
                self._noted.pop(victim.manifest, None)
                count += 1
        except BdnError as error:
            left = [victim.manifest for victim in victims[count:]]
            self._count_again(left, last_used)
            self.events.decided(kept(filter(self.index.holds, left), error))
            raise
        finally:
            if count:
                self.events.evicted(reason, count)
                self.events.changed()

    def _count_again(self, manifests: Iterable[Digest], last_used: Mapping[Digest, float]) -> None:
        """What their folders still hold. Not by the folders' times: a deletion that began has set them."""
        for manifest in manifests:
            with suppress(BdnError):  # what cannot even be looked at cannot be served either; the next start counts it
                found = self.files.look_at(manifest)
                if found is not None:
                    self.index.restore(manifest, found.chunks, last_used=last_used[manifest])


def _made_room(victim: Victim, newcomer: Digest) -> Event:
    return Event.of(
        "made_room", {"tier": "cluster", "bytes": victim.size, "newcomer": str(newcomer)}, manifest=victim.manifest
    )
