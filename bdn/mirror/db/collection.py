"""Every statement about collections: manifests that no organisation may read, old evidence, and the plan of a dry run.

A manifest belongs to every organisation that mirrored it. It is *given up* by one that has a tombstone for it, *dead*
when all have one, and dead *since* the last of these was written.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    MetaData,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from bdn.mirror.db import chunks, events, manifests
from bdn.mirror.db.chunks import ChunkState, SetState
from bdn.mirror.db.database import Database, ReadSession, WriteSession, delete_in, select_in
from bdn.mirror.db.mirrors import listing_owner
from bdn.mirror.db.tables import (
    ChunkRow,
    ChunkSetRow,
    ManifestRow,
    MirrorSourceRow,
    QuarantinedFileRow,
    SetChunkRow,
    TombstoneRow,
)

_AT_ONCE: Final = 250  # files with wrong content per transaction


# --- manifests that no organisation may read ---


async def expired(session: ReadSession, before: float) -> list[str]:
    """Manifests that have been dead since ``before`` or longer."""
    return sorted((await session.execute(_expired(before))).scalars())


def _expired(before: float) -> Select[str]:
    """A manifest that no mirror names any more is dead since its creation."""
    given_up = exists().where(TombstoneRow.manifest == ManifestRow.digest, TombstoneRow.created_at <= before)
    return select(ManifestRow.digest).where(
        or_(ManifestRow.created_at <= before, given_up), ~exists(_living_sources(ManifestRow.digest, before))
    )


def _dead() -> Select[str]:
    """The manifests that no organisation may read, whether or not they can still be restored."""
    return select(TombstoneRow.manifest).where(
        TombstoneRow.collected_at.is_(None), ~exists(_living_sources(TombstoneRow.manifest))
    )


def _living_sources(manifest: InstrumentedAttribute[str], before: float | None = None) -> Select[str]:
    """Sources of this manifest whose organisation has no tombstone for it, or one younger than ``before``."""
    source, tombstone = aliased(MirrorSourceRow), aliased(TombstoneRow)
    joined = and_(tombstone.organisation == source.organisation, tombstone.manifest == source.manifest)
    if before is not None:
        joined = and_(joined, tombstone.created_at <= before)
    return (
        select(source.mirror_id)
        .outerjoin(tombstone, joined)
        .where(source.manifest == manifest, tombstone.manifest.is_(None))
        .correlate(manifest.class_)
    )


async def drop(session: WriteSession, manifest: str, before: float, now: float, size: int) -> bool:
    """Drop an expired manifest, with the listings of its sources.

    Returns False if it was restored, published or dropped meanwhile. ``size`` is recorded: the bytes that this frees.
    """
    await manifests.lock(session, [manifest])  # check after locking: earlier changes are visible, later ones wait
    is_expired = _expired(before).where(ManifestRow.digest == manifest)
    if (await session.execute(is_expired)).scalar() is None:
        return False
    await chunks.of(session, chunks.end_kept, await _listing_owners(session, manifest), chunks.NO_GRACE)
    listed = MirrorSourceRow.manifest == manifest, MirrorSourceRow.listing.is_not(None)
    await session.execute(update(MirrorSourceRow).where(*listed).values(listing=None))
    await manifests.drop(session, [manifest])
    # Organisations that gave it up may not read it even when another organisation mirrors it again.
    await session.execute(update(TombstoneRow).where(TombstoneRow.manifest == manifest).values(collected_at=now))
    await events.record(session, now, [events.event_of("collected", {"bytes": size}, manifest)])
    return True


async def sets_of(session: ReadSession, manifest: str) -> list[int]:
    """The sets that end with a manifest: its own, and the sets of its sources' listings."""
    owners = await _listing_owners(session, manifest)
    listings = select(ChunkSetRow.id).where(ChunkSetRow.state != SetState.DEAD)
    found = [set_id async for (set_id,) in select_in(session, listings, ChunkSetRow.owner, owners)]
    return [*(await manifests.set_ids(session, [manifest])).values(), *found]


async def _listing_owners(session: ReadSession, manifest: str) -> list[str]:
    listed = select(MirrorSourceRow.mirror_id, MirrorSourceRow.position).where(
        MirrorSourceRow.manifest == manifest, MirrorSourceRow.listing.is_not(None)
    )
    return [listing_owner(*row) for row in await session.execute(listed)]


# --- files with wrong content ---


async def drop_evidence(session: WriteSession, before: float) -> int:
    """Delete some files with wrong content from before then, with their evidence. Returns how many."""
    some = list((await session.execute(_evidence(before).limit(_AT_ONCE))).scalars())
    await chunks.of(session, chunks.end_kept, list(map(_evidence_owner, some)), chunks.NO_GRACE)
    await delete_in(session, QuarantinedFileRow.id, some)
    return len(some)


def _evidence(before: float) -> Select[str]:
    return select(QuarantinedFileRow.id).where(QuarantinedFileRow.created_at < before)


def _evidence_owner(name: str) -> str:
    return f"evidence:{name}"


# --- the plan of a dry run ---

_GOING: Final = Table(
    "going",
    MetaData(),
    Column("set_id", BigInteger, primary_key=True),
    Column("ended_at", Float(53), nullable=False),
    prefixes=["TEMPORARY"],
)


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """A read session, and a temporary table of its own with the sets that would be dead by now."""

    session: ReadSession

    async def add(self, set_ids: Collection[int]) -> None:
        """Add sets that would end without a grace."""
        if rows := [{"set_id": set_id, "ended_at": chunks.NO_GRACE} for set_id in set_ids]:
            await self.session.execute(insert(_GOING), rows)

    async def add_evidence(self, before: float) -> int:
        """Add the evidence from before then. Returns the number of its files."""
        names = list((await self.session.execute(_evidence(before))).scalars())
        kept = select(ChunkSetRow.id).where(ChunkSetRow.state != SetState.DEAD)
        owners = list(map(_evidence_owner, names))
        await self.add([row[0] async for row in select_in(self.session, kept, ChunkSetRow.owner, owners)])
        return len(names)

    async def add_dead(self, but: Collection[str]) -> None:
        """Add all manifests that no organisation may read, except ``but``."""
        for manifest in {*(await self.session.execute(_dead())).scalars()} - {*but}:
            await self.add(await sets_of(self.session, manifest))

    async def freed(self, manifest: str, *, is_kept: bool = False) -> int:
        """The bytes that one more manifest frees. With ``is_kept`` the plan stays as it was.

        A chunk's bytes are freed with the last set that refers to it. So of several manifests that share a chunk, only
        the last frees it.
        """
        own = await sets_of(self.session, manifest)
        await self.add(own)
        named = exists().where(SetChunkRow.chunk_id == ChunkRow.id, SetChunkRow.set_id.in_(own))
        others = select(func.count()).select_from(SetChunkRow).join(_GOING, _GOING.c.set_id == SetChunkRow.set_id)
        others = others.where(SetChunkRow.chunk_id == ChunkRow.id)
        alone = or_(ChunkRow.refs == 1, ChunkRow.refs == others.scalar_subquery())
        query = select(func.coalesce(func.sum(ChunkRow.size), 0)).where(named, alone)
        size = int((await self.session.execute(query)).scalar_one())
        if is_kept:
            await self.session.execute(delete(_GOING).where(_GOING.c.set_id.in_(own)))
        return size

    async def chunks(self, grace_seconds: float, now: float) -> tuple[int, int]:
        """How many chunks a collection would delete, and their bytes."""
        sums = func.count(), func.coalesce(func.sum(ChunkRow.size), 0)
        is_old = chunks.is_collectable(ChunkRow.changed_at, grace_seconds, now)
        count, size = (await self.session.execute(select(*sums).where(ChunkRow.refs == 0, is_old))).one()
        let_go = (
            select(SetChunkRow.chunk_id, func.count().label("refs"), func.max(_GOING.c.ended_at).label("ended_at"))
            .join(_GOING, _GOING.c.set_id == SetChunkRow.set_id)
            .group_by(SetChunkRow.chunk_id)
            .subquery()
        )
        of_sets = select(*sums).join(let_go, and_(let_go.c.chunk_id == ChunkRow.id, let_go.c.refs == ChunkRow.refs))
        of_sets = of_sets.where(
            chunks.is_collectable(let_go.c.ended_at, grace_seconds, now),
            or_(ChunkRow.state == ChunkState.STORED, is_old),
        )
        more, bytes_more = (await self.session.execute(of_sets)).one()
        return count + more, int(size) + int(bytes_more)


@asynccontextmanager
async def plan(database: Database) -> AsyncIterator[CollectionPlan]:
    """Begin with the sets that are dead by now. However long the session lives, it blocks nothing."""
    async with database.read(patient=True) as session:
        await (await session.connection()).run_sync(_GOING.create)
        dead = select(ChunkSetRow.id, ChunkSetRow.ended_at).where(ChunkSetRow.state == SetState.DEAD)
        await session.execute(insert(_GOING).from_select(["set_id", "ended_at"], dead))
        yield CollectionPlan(session)
