"""The node tier's cache: decisions of ``CacheIndex``, carried out on disk under one lock."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from bdn.core.cache.index import CacheIndex, EvictionPlan, EvictionReason, Holder, Steps, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.core.events import Event
from bdn.core.layout import Manifest
from bdn.disk.threads import in_thread, to_the_end
from node_agent.background_tasks import in_steps
from node_agent.cache.cache_events import (
    Account,
    CacheEvents,
    Decisions,
    admitted,
    dropped,
    for_room,
    kept,
    over_budget,
    refused,
)
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.records import CacheFiles, Held
from node_agent.cache.space import Space

_STEP_SECONDS: Final = 1e-6  # both a float of epoch seconds and a file's time can represent this difference


class UseClock:
    """The wall clock, but strictly increasing. Thread-safe.

    A story: the clock is a day ahead, A is used, the clock is set right, B is used. By the wall clock B was used a day
    before A and would be evicted first. Here B's time is A's plus one step, until the wall clock has caught up.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._last = 0.0

    def __call__(self) -> float:
        """Seconds since the epoch, later than every time before."""
        with self._lock:
            self._last = max(self._wall(), self._last + _STEP_SECONDS)
            return self._last

    def seen(self, at: float) -> None:
        """Register a time of use that was read from disk, so that later times are greater."""
        with self._lock:
            self._last = max(self._last, at)


Clock = Callable[[], float]


@dataclass
class NodeCache:
    """The node tier. ``CacheIndex`` decides; this class carries the decisions out on disk.

    Committed and reserved bytes together never exceed the budget, nor do the bytes on disk: victims are deleted under
    the lock, before the admission that needs their room returns. Index and disk change together. If the disk fails
    half-way, the index is corrected from the disk.
    """

    index: CacheIndex
    files: CacheFiles
    chunks: HeldChunks
    space: Space
    clock: Clock
    events: CacheEvents
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _idle: set[str] = field(default_factory=set)  # stages that hold leases, lack files and fill none

    async def admit(self, held: Sequence[Held], holder: Holder) -> frozenset[Digest]:
        """Lease the manifests for ``holder``, or change none of its leases. Returns the contents still to be filled.

        Raises:
            CacheTooSmallError, CacheFullError: with numbers; nothing was evicted.
            DiskFailedError: victims deleted by then are gone; no lease was added.
        """
        async with self._lock:
            self._idle.discard(holder.stage_id)
            return await to_the_end(_Admission(self, held, holder).run())

    async def manifest(self, digest: Digest) -> Manifest | None:
        return await in_thread(self.files.records.manifest, digest)

    async def lease(self, manifest: Digest, holder: Holder) -> bool:
        """Protect a manifest from eviction. Returns False if it is not held."""
        async with self._lock:
            if is_held := self.index.holds(manifest):
                self.index.leases.take(manifest, holder)
            return is_held

    async def leave(self, stage_id: str) -> None:
        """End a stage's leases, after its fills. Releases room reserved for files that were never begun."""
        async with self._lock:
            await to_the_end(self._leave(stage_id))

    async def _leave(self, stage_id: str) -> None:
        ended = self.index.leases.end(stage_id)
        left = [digest for digest in ended if not self.index.leases.is_leased(digest)]
        now = self.clock()
        self._idle.discard(stage_id)
        for manifest in ended:  # also manifests leased by other stages: idle stages fill nothing that was reserved
            await self._give_back(manifest, stage_id)
        for manifest in left:
            self.index.recency.touch(manifest, now)
            with suppress(BdnError):  # loses only the LRU order after the next restart
                await in_thread(self.files.records.touch, manifest, now)
        gone = [digest for digest in left if not self._is_counted(digest)]
        why = dropped(gone, "its last stage ended, and nothing of it is in the cache")
        await self.forget(gone, why)
        self.events.changed()

    def _is_counted(self, manifest: Digest) -> bool:
        return any(self.index.ledger.size_of(content) is not None for content in self.index.contents_of(manifest))

    async def rest(self, stage_id: str) -> None:
        """Mark a stage that fills nothing as idle; it holds its leases. Releases room for files never begun."""
        async with self._lock:
            self._idle.add(stage_id)
            for manifest in self.index.leases.of(stage_id):
                await to_the_end(self._give_back(manifest, stage_id))

    async def _give_back(self, manifest: Digest, stage_id: str) -> None:
        """Release room reserved for contents never begun, unless another active stage may fill them."""
        for content in await in_thread(self.files.unbegun, self._reserved_for(manifest, stage_id)):
            self.index.lose(content)

    def _reserved_for(self, manifest: Digest, stage_id: str) -> list[Digest]:
        """Contents of the manifest that are reserved, and that no other active stage may fill."""
        ledger = self.index.ledger
        if self.index.is_complete(manifest):
            return []
        return [
            content
            for content in self.index.contents_of(manifest)
            if ledger.size_of(content) is not None
            and not ledger.is_committed(content)
            and not any(self._is_filled_beside(name, stage_id) for name in self.index.named_by(content))
        ]

    def _is_filled_beside(self, manifest: Digest, stage_id: str) -> bool:
        holders = {holder.stage_id for holder in self.index.leases.holders(manifest)}
        return bool(holders - {stage_id} - self._idle)

    async def evict(
        self, plan: Callable[[CacheIndex], Steps[EvictionPlan]], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Carry out ``plan``, made from the index under the lock; ``account`` gives the reason for each victim."""
        async with self._lock:
            return await to_the_end(self._evict(plan, reason, account))

    async def trim(self) -> None:
        """Evict what exceeds the budget, which shrinks when other data fills the disk or the operator lowers it.

        The disk is measured under the lock: bytes that another call is deleting are no longer counted, but not free
        yet.
        """
        async with self._lock:
            await to_the_end(self._trim())

    async def _trim(self) -> None:
        room = await in_thread(self.space.room)
        if self.index.ledger.used_bytes > room.budgets.node:
            # A fill that was ending was counted neither as a part nor as whole. The larger room counts, so nothing is
            # evicted for it.
            room = max(room, await in_thread(self.space.room), key=lambda one: one.budgets.node)
        self.space.tell(room)
        budget, held = room.budgets.node, self.index.ledger.used_bytes
        if held > budget:
            account = over_budget("node", held, budget, room.limits.node)
            await self._evict(lambda index: index.planning(size=held - budget), "trim", account)

    async def make_room(self, size: int, manifest: Digest, holder: Holder) -> None:
        """Evict as far as possible until the disk has ``size`` bytes free, for copies of a leased manifest."""
        async with self._lock:
            lacking = size - await in_thread(self.space.free)
            if lacking > 0:
                account = for_room(holder, [manifest])
                await to_the_end(self._evict(lambda index: index.planning(size=lacking), "lru", account))

    async def set_aside(self, name: str, size: int, occupied: Callable[[], int]) -> None:
        """Reserve bytes of the disk for job volumes until ``space.aside.end(name)``, evicting to make room.

        Raises:
            CacheTooSmallError, CacheFullError: nothing is reserved.
            DiskFailedError: nothing is reserved; victims deleted by then are gone.
        """
        async with self._lock:
            await to_the_end(self._set_aside(name, size, occupied))

    async def _set_aside(self, name: str, size: int, occupied: Callable[[], int]) -> None:
        if size > (most := await in_thread(self.space.most)):
            raise CacheTooSmallError(size, most)
        self.space.aside.begin(name, size, occupied)
        try:
            await self._check_room_beside(size)  # before evicting in vain
            await self._trim()
            await in_thread(self.chunks.tier.trim)
            await self._check_room_beside(size, self.index.ledger.used_bytes)
        except BaseException:
            self.space.aside.end(name)
            raise

    async def _check_room_beside(self, size: int, used: int = 0) -> None:
        """Check that the remaining room is enough for leased content, or for ``used`` bytes if these are more."""
        room = await in_thread(self.space.room)
        leased = await in_steps(self.index.counting_leased())
        if room.is_pressed or max(leased, used) > room.budgets.node:
            free = max(0, size + room.budgets.node - room.pressed.node - leased)
            raise CacheFullError(size, min(free, size - 1), leased, size + room.budgets.node)

    async def withdraw(self, content: Digest, take: Callable[[], bool]) -> None:
        """Stop holding a whole file that is wrong or gone. Its manifests stay, and the next stage fills it again.

        ``take`` moves the file out of ``files`` and returns whether a part of it is left in ``filling``. It blocks.

        Raises ``DiskFailedError``: the file may not have moved; the next start finds it there.
        """
        async with self._lock:
            await to_the_end(self._withdraw(content, take))

    async def _withdraw(self, content: Digest, take: Callable[[], bool]) -> None:
        names = self.index.named_by(content)
        if not names or not self.index.ledger.is_committed(content):
            return  # evicted meanwhile
        self.index.lose(content)  # before the move: a caller must not see a file as whole that is not there
        if await in_thread(take):
            name = next(iter(names))
            contents, last_used = self.index.contents_of(name), self.index.recency.last_used(name)
            self.index.restore(name, contents, {content: False}, last_used=last_used)
        self.events.changed()

    # --- with the lock held ---

    async def _evict(
        self, plan: Callable[[CacheIndex], Steps[EvictionPlan]], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Victims that a failing disk does not delete are counted again, and recorded as kept."""
        decided = await in_steps(plan(self.index))
        await in_steps(self.index.evicting(decided.victims))
        try:
            await in_thread(self.delete, decided.victims, map(account, decided.victims))
        except BdnError as error:
            left = await in_thread(self.files.left_of, decided.victims)
            for found in left:
                found.restore(self.index)
            await in_thread(self.events.decided, kept((found.manifest for found in left), error))
            raise
        finally:
            await self.announce([one for one in decided.victims if not self.index.holds(one.manifest)], reason)
        return decided

    async def forget(self, manifests: Iterable[Digest], why: Decisions) -> None:
        """Drop manifests without any content left to hold."""
        plan = await in_steps(self.index.planning(manifests))
        await in_steps(self.index.evicting(plan.victims))
        await in_thread(self._remove_chunks, plan.victims)
        with suppress(BdnError):  # the next start removes a record without content
            await in_thread(self.delete, plan.victims, why)

    def delete(self, victims: Sequence[Victim], decisions: Iterable[Event]) -> None:
        """Record the decisions before deleting, so that the reasons survive a kill in between. Blocking."""
        self.events.decided(list(decisions))
        self.files.delete(victims)

    async def announce(self, victims: Sequence[Victim], reason: EvictionReason) -> None:
        """Stop serving chunks of the evicted manifests, and notify listeners."""
        await in_thread(self._remove_chunks, victims)
        if victims:
            await in_thread(self.events.evicted, reason, victims)
        self.events.changed()

    def _remove_chunks(self, victims: Sequence[Victim]) -> None:
        for victim in victims:
            self.chunks.remove(victim.manifest)


class _Admission:
    """Admits all manifests of one stage, or none. Created, and run once, under the cache's lock.

    lease what is here → count all in, which chooses victims → record and delete the victims → record the newcomers
    ↘ if a step fails: count again what the disk still has, restore the leases held before, drop the newcomers
    """

    def __init__(self, cache: NodeCache, held: Sequence[Held], holder: Holder) -> None:
        self.cache, self.index = cache, cache.index
        self.held, self.holder = held, holder
        self._leased = self.index.leases.of(holder.stage_id)
        self._new = [one.manifest.digest for one in held if not self.index.holds(one.manifest.digest)]
        self._contents = {digest: size for one in held for digest, size in one.manifest.contents.items()}
        self._absent = [content for content in self._contents if self.index.ledger.size_of(content) is None]
        self._victims: list[Victim] = []

    async def run(self) -> frozenset[Digest]:
        budget = await in_thread(self._budget)
        free_files = await in_thread(self.cache.space.free_files)
        now = self.cache.clock()
        for one in self.held:  # all leases first: making room for one manifest must not evict another of the same stage
            if self.index.holds(one.manifest.digest):
                self.index.leases.take(one.manifest.digest, self.holder)
        try:
            missing = await self._count_in(budget, free_files, now)
            newcomers = admitted(self.index, self.held, self.holder, budget)
            brought = [one.manifest.digest for one in self.held]
            decisions = chain(map(for_room(self.holder, brought), self._victims), newcomers)
            await in_thread(self.cache.delete, self._victims, decisions)
            for one in self.held:
                await in_thread(self.cache.files.records.save, one, now)
                await in_thread(self.cache.chunks.add, one)
        except BdnError as error:
            await self._undo(error)
            raise
        await self.cache.announce(self._victims, "lru")
        return missing

    def _budget(self) -> int:
        """The budget, less the padding of the files to be added: the file system fills up their last blocks."""
        padding = self.cache.space.padding([self._contents[content] for content in self._absent])
        return self.cache.space.room(padding).budgets.node

    async def _count_in(self, budget: int, free_files: int | None, now: float) -> frozenset[Digest]:
        """The index checks each manifest, this their sum. ``free_files`` None: the disk has no limit on files."""
        total = sum(self._contents.values())
        ledger, aside = self.index.ledger, self.cache.space.aside.promised
        if self._absent and total > budget:
            if total > budget + aside:
                raise CacheTooSmallError(total, budget)
            raise CacheFullError(total, max(0, budget - ledger.used_bytes), aside, budget + aside)
        most_files = None if free_files is None else free_files + ledger.count
        missing: set[Digest] = set()
        for one in self.held:
            admission = await in_steps(
                self.index.admitting(
                    one.manifest.digest,
                    one.manifest.contents,
                    self.holder,
                    now=now,
                    budget=budget,
                    free_files=None if most_files is None else most_files - ledger.count,
                )
            )
            self._victims.extend(admission.victims)
            missing.update(admission.missing)
        return frozenset(missing)

    async def _undo(self, error: BdnError) -> None:
        """Restore index and leases, as far as the victims are still on disk. One step for readers of the index."""
        refusal = refused(self.index, self.held, self.holder, error)
        left = await in_thread(self.cache.files.left_of, self._victims)
        self.index.leases.end(self.holder.stage_id)
        # A victim's content may have been reserved for a later newcomer that shares it. Its state is now read from the
        # disk.
        given_up = [content for victim in self._victims for content in victim.contents]
        for content in (*self._absent, *given_up):
            self.index.lose(content)
        for found in left:
            found.restore(self.index)
        for manifest in self._leased:
            self.index.leases.take(manifest, self.holder)
        # A refusal comes before anything is recorded. Other errors come after, and then the recorded decisions were not
        # carried out.
        happened = kept((found.manifest for found in left), error) + dropped(self._new, str(error))
        await self.cache.forget(self._new, refusal or happened)
