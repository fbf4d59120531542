"""Every statement about damage: chunks with wrong objects, the scrub that finds them, files with wrong content.

Damage is a column of the chunk's row. A damage, repair or loss is recorded in the same transaction, as an event of the
manifests whose sets refer to the chunk. Damage of a chunk that no manifest names is not reported: listings, evidence,
mirrors at work.
"""

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import ColumnElement, Row, exists, func, or_, select

from bdn.core.chunk import Digest
from bdn.mirror.db import chunks, events, manifests, origins
from bdn.mirror.db.chunks import Acquired, ChunkState, StoredChunk
from bdn.mirror.db.database import ReadSession, WriteSession, batches
from bdn.mirror.db.tables import ChunkRow, EventRow, FactRow, ManifestRow, QuarantinedFileRow, SetChunkRow

_REPORTED: Final = 100  # manifests per event: a chunk may be in a thousand revisions
_SCRUB: Final = "scrub"


# --- damage ---


async def get(session: ReadSession, digest: Digest) -> ChunkRow | None:
    return (await session.execute(select(ChunkRow).where(ChunkRow.digest == digest.to_bytes()))).scalar()


async def mark(session: WriteSession, digest: Digest, chunk_id: int, reason: str, now: float) -> bool:
    """Mark a chunk as damaged: it counts as never put.

    Returns False if the chunk is not stored, or was deleted and put again since its row was read.
    """
    row = await get(session, digest)
    if row is None or row.id != chunk_id or not await chunks.of(session, chunks.mark_damaged, digest, reason, now):
        return False
    await _record(session, "damaged", digest, reason, now)
    return True


async def acquire(
    session: WriteSession, set_id: int, sizes: Mapping[Digest, int], now: float, durable: Collection[Digest]
) -> Acquired:
    """``chunks.acquire``, and record a repair for each durable chunk that was damaged."""
    found = await chunks.of(session, chunks.acquire, set_id, sizes, now, durable)
    for digest, reason in found.repaired.items():
        await _record(session, "repaired", digest, reason, now)
    return found


async def reasons(session: ReadSession, digests: Collection[Digest] | None = None) -> dict[Digest, str]:
    """What was found wrong with each damaged chunk, of these chunks or (None) of all."""
    query = select(ChunkRow.digest, ChunkRow.damage).where(ChunkRow.damage.is_not(None))
    if digests is None:
        return {Digest.from_bytes(raw): str(reason) for raw, reason in (await session.execute(query)).all()}
    found: dict[Digest, str] = {}
    for some in batches(sorted(set(digests)), chunks.AT_ONCE):
        among = query.where(ChunkRow.digest.in_([digest.to_bytes() for digest in some]))
        found |= {Digest.from_bytes(raw): str(reason) for raw, reason in (await session.execute(among)).all()}
    return found


@dataclass(frozen=True, slots=True)
class Damage:
    digest: Digest
    size: int
    reason: str


async def named(session: ReadSession, digests: Collection[Digest] | None = None) -> list[Damage]:
    """Damage of chunks that a manifest names, of these or (None) of all, in the order of their ids."""
    query = select(ChunkRow.digest, ChunkRow.size, ChunkRow.damage).where(_is_damaged_and_named())
    if digests is not None:
        query = query.where(ChunkRow.digest.in_([digest.to_bytes() for digest in digests]))
    rows = (await session.execute(query.order_by(ChunkRow.id))).all()
    return [Damage(Digest.from_bytes(raw), size, str(reason)) for raw, size, reason in rows]


async def count(session: ReadSession) -> int:
    query = select(func.count()).select_from(ChunkRow).where(_is_damaged_and_named())
    return (await session.execute(query)).scalar_one()


def _is_damaged_and_named() -> ColumnElement[bool]:
    is_named = exists().where(SetChunkRow.chunk_id == ChunkRow.id, ManifestRow.set_id == SetChunkRow.set_id)
    return ChunkRow.damage.is_not(None) & is_named


async def record_loss(session: WriteSession, damage: Damage, now: float) -> None:
    """Record that no agent and no upstream has the chunk now: once per damage, however often a repair is tried."""
    about = select(func.max(EventRow.at)).where(EventRow.digest == damage.digest.hex, EventRow.node.is_(None))
    found_at = (await session.execute(about.where(EventRow.kind == "damaged"))).scalar() or 0.0
    if not await events.is_recorded(session, "lost", damage.digest.hex, found_at):
        await _record(session, "lost", damage.digest, damage.reason, now)


async def _record(session: WriteSession, kind: str, digest: Digest, reason: str, now: float) -> None:
    """Record an event for the newest manifests that name the chunk.

    The event omits the sources that were tried in vain: they may belong to other organisations.
    """
    facts = {"tier": "mirror", "reason": reason}
    found = await origins.manifests_with(session, None, digest, _REPORTED)
    await events.record(session, now, [events.event_of(kind, facts, one, digest=digest.hex) for one in found])


# --- the scrub ---


async def after(session: ReadSession, chunk_id: int, names: Sequence[str] | None, wanted: int) -> list[StoredChunk]:
    """The next chunks after this id that should be in the store: of these manifests, or (None) all with references."""
    query = select(ChunkRow.id, ChunkRow.digest, ChunkRow.size).limit(wanted)
    query = query.where(or_(ChunkRow.state == ChunkState.STORED, ChunkRow.damage.is_not(None)))
    if names is None:
        everything = query.where(ChunkRow.refs > 0, ChunkRow.id > chunk_id).order_by(ChunkRow.id)
        return list(map(_stored, (await session.execute(everything)).all()))
    found: dict[int, StoredChunk] = {}
    # One index range per set: a single query over all sets would sort all remaining rows for each part.
    of_set = query.join(SetChunkRow, SetChunkRow.chunk_id == ChunkRow.id).order_by(SetChunkRow.chunk_id)
    for set_id in (await manifests.set_ids(session, names)).values():
        rows = await session.execute(of_set.where(SetChunkRow.set_id == set_id, SetChunkRow.chunk_id > chunk_id))
        found |= {row[0]: _stored(row) for row in rows.all()}
    return [found[one] for one in sorted(found)[:wanted]]


def _stored(row: Row[int, bytes, int]) -> StoredChunk:
    return StoredChunk(row[0], Digest.from_bytes(row[1]), row[2])


@dataclass(frozen=True, slots=True)
class ScrubState:
    """Progress of the scrub. ``cursor`` is the id of the chunk that was read last; None between two rounds."""

    started_at: float
    completed_at: float | None = None
    cursor: int | None = None


async def scrub_state(session: ReadSession) -> ScrubState | None:
    row = await session.get(FactRow, _SCRUB)
    return ScrubState(**row.value) if row else None


async def save_scrub_state(session: WriteSession, state: ScrubState) -> None:
    await session.merge(FactRow(name=_SCRUB, value=asdict(state)))
    await session.flush()


# --- files with wrong content ---


async def keep_wrong_file(
    session: WriteSession,
    digests: Iterable[Digest],
    *,
    mirror_id: str,
    source: str,
    path: str,
    size: int,
    expected: str,
    actual: str,
) -> None:
    """Record a file with wrong content as evidence: a set without a manifest refers to its chunks."""
    name = f"qua_{secrets.token_hex(12)}"
    row = {"mirror_id": mirror_id, "source": source, "path": path, "size": size, "expected": expected, "actual": actual}
    session.add(QuarantinedFileRow(id=name, created_at=time.time(), **row))
    set_id = await chunks.of(session, chunks.begin, f"evidence:{name}")
    await chunks.of(session, chunks.hold, set_id, list(digests))
    await chunks.of(session, chunks.publish, set_id)
    await session.flush()


async def count_wrong_files(session: ReadSession) -> int:
    return (await session.execute(select(func.count()).select_from(QuarantinedFileRow))).scalar_one()
