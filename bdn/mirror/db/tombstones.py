"""What organisations gave up: they may not read it, and once nobody may, it can be collected.

A manifest belongs to every organisation that mirrored it. It is *given up* by one that has a tombstone for it, *dead* when
all have one, and dead *since* the last of them was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, select, update
from sqlalchemy.orm import InstrumentedAttribute, aliased

from bdn.mirror.db.database import ReadSession, WriteSession, batches, insert_new
from bdn.mirror.db.tables import ManifestContentRow, ManifestRow, MirrorRow, MirrorSourceRow, TombstoneRow


async def write(session: WriteSession, organisation: str, manifests: Sequence[str], eviction: str, now: float) -> None:
    """The organisation, which may read these manifests, gives them up."""
    rows = [
        {"organisation": organisation, "manifest": manifest, "created_at": now, "eviction": eviction}
        for manifest in manifests
    ]
    await insert_new(session, TombstoneRow, rows)


async def restore(session: WriteSession, organisation: str, manifests: Sequence[str]) -> list[str]:
    """The organisation may read these manifests again, as far as they were not collected; returns those."""
    restored: list[str] = []
    for batch in batches(manifests):
        statement = (
            delete(TombstoneRow)
            .where(
                TombstoneRow.organisation == organisation,
                TombstoneRow.manifest.in_(batch),
                TombstoneRow.collected_at.is_(None),
            )
            .returning(TombstoneRow.manifest)
        )
        restored += (await session.execute(statement)).scalars()
    return restored


async def lift(session: WriteSession, organisation: str, manifest: str) -> None:
    """The organisation has mirrored the manifest again."""
    statement = delete(TombstoneRow).where(TombstoneRow.organisation == organisation, TombstoneRow.manifest == manifest)
    await session.execute(statement)


async def collect(session: WriteSession, manifest: str, now: float) -> None:
    """Nothing can be restored any more, and who gave it up may not read it either when somebody else mirrors it again."""
    await session.execute(update(TombstoneRow).where(TombstoneRow.manifest == manifest).values(collected_at=now))


def is_given_up(organisation: str, manifest: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """The organisation has a tombstone for it."""
    return exists().where(TombstoneRow.organisation == organisation, TombstoneRow.manifest == manifest)


async def others_read(session: ReadSession, organisation: str, manifests: Sequence[str]) -> set[str]:
    """Which of these manifests would not be dead if this organisation gave them up."""
    found: set[str] = set()
    for batch in batches(manifests):
        query = (
            select(MirrorSourceRow.manifest)
            .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
            .outerjoin(TombstoneRow, _of_source())
            .where(
                MirrorSourceRow.manifest.in_(batch),
                MirrorRow.organisation != organisation,
                TombstoneRow.manifest.is_(None),
            )
            .distinct()
        )
        found.update(str(manifest) for manifest in (await session.execute(query)).scalars())
    return found


async def an_expired(session: ReadSession, before: float) -> str | None:
    """A published manifest that is dead since then or longer. One that no mirror names any more is as old as it is."""
    query = select(ManifestRow.digest).where(
        ManifestRow.created_at <= before, ~exists(_living(ManifestRow.digest, before))
    )
    return (await session.execute(query.order_by(ManifestRow.digest).limit(1))).scalar()


def dead() -> Select[str]:
    """The manifests that nobody may read, whether or not they can still be restored."""
    return select(TombstoneRow.manifest).where(
        TombstoneRow.collected_at.is_(None), ~exists(_living(TombstoneRow.manifest))
    )


async def living(session: ReadSession, contents: Sequence[str]) -> set[str]:
    """Which of these contents a manifest names that somebody may read."""
    found: set[str] = set()
    for batch in batches(contents):
        query = select(ManifestContentRow.content).where(
            ManifestContentRow.content.in_(batch), ManifestContentRow.manifest.not_in(dead())
        )
        found.update((await session.execute(query.distinct())).scalars())
    return found


async def count_restorable(session: ReadSession) -> int:
    """How many have not been collected."""
    query = select(func.count()).select_from(TombstoneRow).where(TombstoneRow.collected_at.is_(None))
    return (await session.execute(query)).scalar_one()


def _living(manifest: InstrumentedAttribute[str], before: float | None = None) -> Select[str]:
    """Sources of this manifest whose organisation has no tombstone for it, or one that is younger than ``before``."""
    source, mirror, tombstone = aliased(MirrorSourceRow), aliased(MirrorRow), aliased(TombstoneRow)
    joined = and_(tombstone.organisation == mirror.organisation, tombstone.manifest == source.manifest)
    if before is not None:
        joined = and_(joined, tombstone.created_at <= before)
    return (
        select(source.mirror_id)
        .join(mirror, mirror.id == source.mirror_id)
        .outerjoin(tombstone, joined)
        .where(source.manifest == manifest, tombstone.manifest.is_(None))
        .correlate(manifest.class_)
    )


def _of_source() -> ColumnElement[bool]:
    return and_(TombstoneRow.organisation == MirrorRow.organisation, TombstoneRow.manifest == MirrorSourceRow.manifest)
