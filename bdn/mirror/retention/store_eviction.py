"""The mirror's own part of an eviction: the organisation gives manifests up. Nothing is deleted until they are collected.

A manifest belongs to every organisation that mirrored it, and goes when the last of them gave it up and had its time to
change its mind. Mirroring it again before that brings it back, and moves no bytes.
"""

import time
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Event
from bdn.core.store import SlabNeeds
from bdn.mirror.db import agents, contents, events, mirrors, operations, removal
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.retention.collector import Collector
from bdn.wire.operation_schema import EvictCommand, EvictedItem, RestorationRequest, RestoredItem
from bdn.wire.shapes import Items, moment


@dataclass(frozen=True)
class StoreEviction:
    """Evicts manifests from the store, one eviction at a time. With ``tombstone_seconds`` 0 they are collected at once."""

    database: Database
    collector: Collector
    tombstone_seconds: float
    clock: Callable[[], float] = field(default=time.time)

    async def run(self, command: EvictCommand, organisation: str) -> None:
        """Plan, record and, unless it is a dry run, carry out; not if nobody waits for the mirror's answer any more.

        What the plan takes is recorded with what it does; the caller says when the mirror's part is over.
        """
        async with self.database.alone("eviction"):
            async with self.database.write() as session:
                part = await operations.lock_mirrors_part(session, command.id)
                if part is None:
                    return
                if not command.dry_run:
                    # A looks at what mirrors at work have published; B publishes, and is at work; A gives up what B counts on.
                    await mirrors.hold_claims(session)
                now = self.clock()
                items = await self._plan(session, command, organisation, now)
                part.result = {"items": [item.model_dump(mode="json") for item in items]}
                victims = [item.manifest.removeprefix("b3:") for item in items if not item.refused]
                if not command.dry_run:
                    await mirrors.give_up(session, organisation, victims, command.id, now)
                    await events.record(session, _decided(items, command, organisation), now)
            if not command.dry_run and victims and not self.tombstone_seconds:
                await self.collector.collect_expired()

    async def _plan(
        self, session: ReadSession, command: EvictCommand, organisation: str, now: float
    ) -> list[EvictedItem]:
        """What goes, and what is refused because a node leases it, or a mirror that still runs has published it.

        Such a mirror is never robbed, forced or not: it would become READY with what nobody may read.
        """
        busy = await mirrors.running_with(session, organisation)
        holders = await _holders(session)
        candidates = await self._candidates(session, command, organisation)
        shared = await mirrors.others_read(session, organisation, candidates)
        until = moment(now + self.tombstone_seconds) if self.tombstone_seconds else None
        items: list[EvictedItem] = []
        weights = EvictionWeights()
        freed = 0
        for digest in candidates:
            working = [f"mirror {mirror_id}" for mirror_id in busy.get(digest, [])]
            held_by = working or holders.get(digest, [])
            refused = bool(working) or (bool(held_by) and not command.force)
            if refused and command.lru_bytes is not None:
                continue  # LRU passes over what is in use
            size = 0 if digest in shared else await weights.take(session, digest, is_kept=refused)
            items.append(
                EvictedItem(
                    tier="mirror",
                    manifest=f"b3:{digest}",
                    bytes=size,
                    refused=refused,
                    holders=held_by,
                    restorable_until=None if refused else until,
                )
            )
            freed += 0 if refused else size
            if command.lru_bytes is not None and freed >= command.lru_bytes:
                break
        return items

    @staticmethod
    async def _candidates(session: ReadSession, command: EvictCommand, organisation: str) -> list[str]:
        """The manifests that the organisation may read and the selector names, least recently used first."""
        if command.manifests is None and not command.all and command.lru_bytes is None:
            return []
        held = [digest for digest, *_ in await contents.manifests(session)]
        own = await mirrors.readable(session, organisation, held)
        wanted = own
        if command.manifests is not None:
            wanted = own.intersection(manifest.removeprefix("b3:") for manifest in command.manifests)
        return [digest for digest in held if digest in wanted]


def _decided(items: list[EvictedItem], command: EvictCommand, organisation: str) -> list[Event]:
    return [Event.of(*_fate(item, command), manifest=item.manifest, organisation=organisation) for item in items]


def _fate(item: EvictedItem, command: EvictCommand) -> tuple[str, dict[str, Fact]]:
    if item.refused:
        request = {"tier": "mirror", "eviction": command.id, "asked_by": command.asked_by}
        return "eviction_refused", {**request, "holders": item.holders}
    until = item.restorable_until.timestamp() if item.restorable_until else None
    return "tombstoned", {"eviction": command.id, "restorable_until": until}


async def _holders(session: ReadSession) -> dict[str, list[str]]:
    """Who leases which manifest, from the agents' last heartbeats."""
    found: dict[str, list[str]] = {}
    for row in await agents.all_agents(session):
        for holding in row.holdings:
            if holding["held_by"]:
                names = [f"{holder} on {row.node}" for holder in holding["held_by"]]
                found.setdefault(holding["manifest"].removeprefix("b3:"), []).extend(names)
    return found


@dataclass
class EvictionWeights:
    """Counts down, manifest by manifest, who still needs each content and each slab. The dead need nothing.

    A content's own bytes are freed with the last manifest that names it, a slab's when the last content goes that needs
    it. So the last of several manifests that share a slab frees all of it, and the others nothing.
    """

    _names: dict[str, int] = field(default_factory=dict)  # of each content, how many manifests that stay name it
    _needs: SlabNeeds = field(default_factory=SlabNeeds)

    async def take(self, session: ReadSession, manifest: str, *, is_kept: bool) -> int:
        """The bytes that the manifest frees; ``is_kept`` only asks, and takes nothing."""
        names = ChainMap({}, self._names) if is_kept else self._names
        await self._look_at_slabs(session, manifest)
        freed = 0
        unnamed: list[str] = []
        for content, size, manifests in await removal.contents_of(session, manifest):
            names[content] = names.get(content, manifests) - 1
            if not names[content]:
                unnamed.append(content)
                freed += size
        gone = self._needs.going(unnamed) if is_kept else self._needs.take(unnamed)
        return freed + self._needs.size(gone)

    async def _look_at_slabs(self, session: ReadSession, manifest: str) -> None:
        slabs = [slab for slab in await removal.slabs_of(session, manifest) if not self._needs.knows(slab)]
        inside = await removal.add_slabs(session, self._needs, slabs)
        living = await mirrors.living_contents(session, inside)
        self._needs.take([content for content in inside if content not in living])


@dataclass(frozen=True)
class Restorations:
    """The service behind ``/restorations``."""

    database: Database
    clock: Callable[[], float] = time.time

    async def restore(self, request: RestorationRequest, organisation: str) -> Items[RestoredItem]:
        """Let the organisation read it again, all of what was named.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: nothing of that was evicted, or it is collected.
        """
        request.check()
        async with self.database.write() as session:
            # A collection goes first, and then there is nothing to restore, or it waits.
            await mirrors.hold_claims(session)
            named = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            restored = sorted(await mirrors.restore(session, organisation, named))
            await contents.touch(session, restored, self.clock())
            decided = [
                Event.of("restored", {}, manifest=f"b3:{digest}", organisation=organisation) for digest in restored
            ]
            await events.record(session, decided, self.clock())
            sources = await mirrors.sources_by_manifest(session, organisation, restored)
        if not restored:
            raise NotFoundError(f"{request.manifest or request.source} among what was evicted and is not collected yet")
        return Items[RestoredItem](
            items=[RestoredItem(manifest=f"b3:{digest}", sources=sources.get(digest, [])) for digest in restored]
        )
