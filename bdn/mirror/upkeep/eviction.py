"""Eviction of manifests from the store by organisations, and their restoration.

A manifest may go when its last organisation has evicted it and the tombstone has expired. Mirroring it again before
that restores it and moves no bytes. Only a collection deletes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bdn.core.errors import Fact, NotFoundError
from bdn.core.events import Event
from bdn.mirror.db import agents, collection, events, manifests, mirrors, operations
from bdn.mirror.db.collection import CollectionPlan
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.upkeep.collection import Collector
from bdn.wire.operation_schema import EvictCommand, EvictedItem, RestorationRequest, RestoredItem
from bdn.wire.shapes import Items, moment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreEviction:
    """Runs one eviction at a time. With ``tombstone_seconds`` 0, evicted manifests are collected at once."""

    database: Database
    collector: Collector
    tombstone_seconds: float
    clock: Callable[[], float] = time.time

    async def run(self, command: EvictCommand, organisation: str) -> None:
        """Plan, record and, unless it is a dry run, carry out. Does nothing if the mirror's part is not open any more.

        Planning blocks no other transaction. The transaction that carries out the plan refuses manifests that came into
        use meanwhile or that a running mirror has published, and records the result. The caller closes the mirror's
        part.
        """
        async with self.database.alone("eviction"):
            now = self.clock()
            async with collection.plan(self.database) as plan:
                candidates, skipped = await self._candidates(plan.session, command, organisation)
                items = await self._plan(plan, command, organisation, now, candidates)
            async with self.database.write() as session:
                part = await operations.lock_mirrors_part(session, command.id)
                if part is None:
                    return
                if not command.dry_run:
                    items = await self._give_up(session, command, organisation, now, items)
                told = {"skipped_pushed": len(skipped), "skipped_pushed_bytes": sum(skipped.values())}
                part.result = {"items": [item.model_dump(mode="json") for item in items], **told}
            victims = [item for item in items if not item.refused]
            if command.dry_run or not victims:
                return
            facts = {"tier": "mirror", "eviction": command.id, "organisation": organisation}
            size = sum(item.bytes for item in victims)
            logger.info("evicted", extra={**facts, "manifests": len(victims), "bytes": size})
            if command.purge or not self.tombstone_seconds:
                await self.collector.collect(grace_seconds=None)

    async def _give_up(
        self, session: WriteSession, command: EvictCommand, organisation: str, now: float, planned: list[EvictedItem]
    ) -> list[EvictedItem]:
        """Carry out a plan, except for what may no longer go. Returns what was done."""
        # Race without this lock: eviction A reads what running mirrors have published; mirror B publishes while
        # running; A evicts the manifest that B is about to report as READY.
        await manifests.lock(session, [_hex(item) for item in planned])
        uses = await self._uses(session, command, organisation, [_hex(item) for item in planned])
        items: list[EvictedItem] = []
        for item in planned:
            held_by, refused = uses[_hex(item)]
            if not refused or item.refused:
                items.append(item)
            elif command.lru_bytes is None:  # LRU skips manifests in use
                items.append(item.model_copy(update={"refused": True, "holders": held_by, "restorable_until": None}))
        victims = [_hex(item) for item in items if not item.refused]
        if command.purge:  # evicts earlier evictions again, dated so that they are collected now
            await mirrors.restore(session, organisation, victims)
        await mirrors.give_up(session, organisation, victims, command.id, 0.0 if command.purge else now)
        await events.record(session, now, (_fate(item, command, organisation) for item in items))
        return items

    async def restore(self, request: RestorationRequest, organisation: str) -> Items[RestoredItem]:
        """Make the named manifests readable again for the organisation.

        Raises:
            InvalidRequestError: the selectors contradict each other.
            NotFoundError: no such manifest was evicted, or it is collected already.
        """
        request.check()
        async with self.database.write() as session:
            named = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            await manifests.lock(session, named)  # a collection runs first, leaving nothing to restore, or waits
            restored = sorted(await mirrors.restore(session, organisation, named))
            await manifests.touch(session, restored, self.clock())
            told = (events.event_of("restored", {}, digest, organisation=organisation) for digest in restored)
            await events.record(session, self.clock(), told)
            sources = await mirrors.sources_by_manifest(session, organisation, restored)
        if not restored:
            raise NotFoundError(
                f"an evicted manifest of {request.manifest or request.source} that is not collected yet"
            )
        return Items[RestoredItem](
            items=[RestoredItem(manifest=f"b3:{digest}", sources=sources.get(digest, [])) for digest in restored]
        )

    async def _plan(
        self, plan: CollectionPlan, command: EvictCommand, organisation: str, now: float, candidates: Sequence[str]
    ) -> list[EvictedItem]:
        """Returns what is evicted and what is refused. LRU skips manifests in use."""
        uses = await self._uses(plan.session, command, organisation, candidates)
        shared = await mirrors.others_read(plan.session, organisation, candidates)
        is_kept = self.tombstone_seconds and not command.purge
        until = moment(now + self.tombstone_seconds) if is_kept else None
        await plan.add_dead(but=candidates)
        items: list[EvictedItem] = []
        freed = 0
        for digest in candidates:
            held_by, refused = uses[digest]
            if refused and command.lru_bytes is not None:
                continue
            size = 0 if digest in shared else await plan.freed(digest, is_kept=refused)
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
    async def _uses(
        session: ReadSession, command: EvictCommand, organisation: str, manifests: Sequence[str]
    ) -> dict[str, tuple[list[str], bool]]:
        """Returns for each manifest its users, and whether the eviction is refused because of them.

        Users are nodes that lease the manifest and running mirrors that have published it; of a refusal, the users that
        are its reason. ``force`` overrides leases but never a running mirror: that mirror would become READY with a
        manifest that its organisation cannot read.
        """
        busy = await mirrors.running_with(session, organisation)
        holders = await agents.holders(session, manifests)
        found: dict[str, tuple[list[str], bool]] = {}
        for digest in manifests:
            working = [f"mirror {mirror_id}" for mirror_id in busy.get(digest, [])]
            held_by = holders.get(digest, [])
            refusing = working or command.in_the_way(held_by)
            found[digest] = refusing or held_by, bool(refusing)
        return found

    @staticmethod
    async def _candidates(
        session: ReadSession, command: EvictCommand, organisation: str
    ) -> tuple[list[str], dict[str, int]]:
        """The manifests that the selector names, least recently used first, and the sizes of pushed ones that it skips.

        The organisation may read them or, for a purge, restore them. A pushed manifest has no upstream to mirror it
        from again: it is evicted only by its digest or its ``bt://`` source, never by age, with ``all``, or because an
        upstream holds the same files.
        """
        if command.manifests is None and not command.all and command.lru_bytes is None:
            return [], {}
        own = await mirrors.all_readable(
            session, organisation, or_restorable=command.purge and command.lru_bytes is None
        )
        named = own if command.manifests is None else {name.removeprefix("b3:") for name in command.manifests}
        selected = [digest for digest in own if digest in named]
        if command.manifests is not None and (command.source is None or command.source.startswith("bt://")):
            return selected, {}
        pushed = await mirrors.pushed_manifests(session, organisation)
        skipped = {digest: own[digest][1] for digest in selected if digest in pushed}
        return [digest for digest in selected if digest not in pushed], skipped


def _hex(item: EvictedItem) -> str:
    return item.manifest.removeprefix("b3:")


def _fate(item: EvictedItem, command: EvictCommand, organisation: str) -> Event:
    kind, facts = "tombstoned", dict[str, Fact](eviction=command.id)
    if item.refused:
        kind = "eviction_refused"
        facts |= {"tier": "mirror", "asked_by": command.asked_by, "holders": item.holders}
    else:
        facts["restorable_until"] = item.restorable_until.timestamp() if item.restorable_until else None
    return events.event_of(kind, facts, _hex(item), organisation=organisation)
