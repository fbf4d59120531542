"""The register of what is wrong: chunks and slabs that the store does not hold as their names say, files that came wrong.

What is found, repaired or lost is an event of the manifests concerned, in the same transaction. What follows from damage is in
``contents``. The chunks of a file that came with the wrong content stay in the store as evidence, and no manifest names them.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from sqlalchemy import delete, exists, func, select

from bdn.core.chunk import Digest
from bdn.core.store import owner_of, split_digests
from bdn.mirror.db import events
from bdn.mirror.db.contents import drop_slabs, unreadable
from bdn.mirror.db.database import ReadSession, WriteSession, insert_new, select_in
from bdn.mirror.db.mirrors import hold_claims, is_mirrored_for
from bdn.mirror.db.tables import (
    ContentChunkRow,
    ContentRow,
    CopiedChunkRow,
    DamagedChunkRow,
    DamagedContentRow,
    ManifestContentRow,
    ManifestRow,
    QuarantinedFileRow,
    SlabRow,
    SlabScopeRow,
    SlabSliceRow,
)

_TOLD: Final = 100  # manifests: a chunk may be one of a thousand revisions


async def is_needed(session: ReadSession, digest: Digest) -> bool:
    """Whether there is a content in the store with such a chunk, or such a slab."""
    return bool(await _with_chunk(session, digest)) or await _is_slab(session, digest)


async def register(session: WriteSession, digest: Digest, now: float, reason: str) -> bool:
    """The store does not hold this as its name says. False when nothing needs it, and then nothing is written.

    Nobody writes in a claim's name meanwhile: whoever records a content from now on sees the row, and what was recorded before
    is found here.
    """
    await hold_claims(session)
    contents = await _with_chunk(session, digest)
    if not contents and not await _is_slab(session, digest):
        return False
    is_known = await get(session, digest.hex) is not None  # another process has read it, too
    await insert_new(session, DamagedChunkRow, [{"digest": digest.hex, "found_at": now, "reason": reason}])
    await insert_new(session, DamagedContentRow, [{"content": content, "chunk": digest.hex} for content in contents])
    await session.execute(delete(CopiedChunkRow).where(CopiedChunkRow.digest == digest.hex))
    if not is_known:
        await _tell(session, "damaged", digest.hex, now)
    return True


async def _with_chunk(session: ReadSession, digest: Digest) -> list[str]:
    """Contents of which it is a chunk, or the only one."""
    several = select(ContentChunkRow.content).where(ContentChunkRow.chunk == digest.hex)
    only = select(ContentRow.digest).where(ContentRow.digest == digest.hex, ContentRow.chunks != b"")
    return list((await session.execute(several.union(only))).scalars())


async def _is_slab(session: ReadSession, digest: Digest) -> bool:
    return await session.get(SlabRow, digest.hex) is not None


async def forgive(session: WriteSession, digest: Digest, now: float) -> bool:
    """The store holds it again; False when it was not registered."""
    await _tell(session, "repaired", digest.hex, now)
    gone = delete(DamagedChunkRow).where(DamagedChunkRow.digest == digest.hex).returning(DamagedChunkRow.digest)
    return (await session.execute(gone)).scalar() is not None


async def is_given_up(session: ReadSession, digest: str) -> bool:
    """Whether it is on record that nobody has it, or nothing is registered: once for each damage, however often one asks again."""
    row = await get(session, digest)
    return row is None or await events.is_recorded(session, "lost", digest, row.found_at)


async def give_up(session: WriteSession, digest: str, now: float) -> None:
    """Nobody has it now."""
    await _tell(session, "lost", digest, now)


async def forget_unneeded(session: WriteSession, before: float) -> None:
    """Nothing needs these any more, which were found before then: what they belonged to was collected."""
    statement = delete(DamagedChunkRow).where(
        DamagedChunkRow.found_at < before,
        ~exists().where(DamagedContentRow.chunk == DamagedChunkRow.digest),
        ~exists().where(SlabRow.digest == DamagedChunkRow.digest),
    )
    await session.execute(statement)


async def get(session: ReadSession, digest: str) -> DamagedChunkRow | None:
    """What is known of this one, if it is damaged."""
    return await session.get(DamagedChunkRow, digest)


async def reasons(session: ReadSession, digests: Sequence[Digest]) -> dict[Digest, str]:
    """Those of these that are damaged, and what is wrong with each."""
    query, names = select(DamagedChunkRow.digest, DamagedChunkRow.reason), [digest.hex for digest in digests]
    return {Digest(name): reason async for name, reason in select_in(session, query, DamagedChunkRow.digest, names)}


async def all_damaged(session: ReadSession) -> list[DamagedChunkRow]:
    """Everything that is damaged, in the order in which it was found."""
    query = select(DamagedChunkRow).order_by(DamagedChunkRow.found_at, DamagedChunkRow.digest)
    return list((await session.execute(query)).scalars())


async def count_damaged(session: ReadSession) -> int:
    """How much is damaged."""
    return (await session.execute(select(func.count()).select_from(DamagedChunkRow))).scalar_one()


async def drop_superseded(session: WriteSession, now: float) -> list[str]:
    """Drop damaged slabs whose contents were packed again, and can be read there by everybody who could read them here."""
    query = select(SlabScopeRow.slab, SlabScopeRow.scope).join(
        DamagedChunkRow, DamagedChunkRow.digest == SlabScopeRow.slab
    )
    scopes: defaultdict[str, list[str]] = defaultdict(list)
    for slab, scope in (await session.execute(query)).all():
        scopes[slab].append(scope)
    superseded = [slab for slab, whose in scopes.items() if not await _is_needed(session, slab, whose)]
    for slab in superseded:
        await drop_slab(session, slab, now)
    return superseded


async def _is_needed(session: ReadSession, slab: str, scopes: Sequence[str]) -> bool:
    query = select(SlabSliceRow.content).where(SlabSliceRow.slab == slab)
    contents = list((await session.execute(query)).scalars())
    for scope in scopes:
        if await unreadable(session, contents, scope):
            return True
    return False


async def drop_slab(session: WriteSession, slab: str, now: float) -> None:
    """What lay in it lies elsewhere."""
    await _tell(session, "repaired", slab, now)
    await drop_slabs(session, [slab])
    await session.execute(delete(DamagedChunkRow).where(DamagedChunkRow.digest == slab))


async def _tell(session: WriteSession, kind: str, digest: str, now: float) -> None:
    """Write it down for each manifest that it is a part of. Not from whom it was asked for in vain: those are others' names."""
    row = await get(session, digest)
    if row is not None:
        facts = {"tier": "mirror", "reason": row.reason}
        told = [
            events.event_of(kind, facts, manifest, digest=digest, organisation=owner)
            for manifest, owner in await _concerned(session, digest)
        ]
        await events.record(session, now, told)


async def _concerned(session: ReadSession, digest: str) -> list[tuple[str, str | None]]:
    """The newest manifests with this damaged chunk, or a file in this damaged slab, and who may hear of it; None: all of theirs.

    A chunk of a file is read by whoever has the manifest. A slab's name is for those alone who may read it as a whole: of a
    private slab its owner hears, for the manifests that were mirrored for it.
    """
    found: list[tuple[str, str | None]] = []
    newest = select(ManifestContentRow.manifest).join(ManifestRow, ManifestRow.digest == ManifestContentRow.manifest)
    newest = newest.group_by(ManifestContentRow.manifest).order_by(func.max(ManifestRow.created_at).desc()).limit(_TOLD)
    chunk = newest.join(DamagedContentRow, DamagedContentRow.content == ManifestContentRow.content)
    chunk = chunk.where(DamagedContentRow.chunk == digest)
    found += [(manifest, None) for manifest in (await session.execute(chunk)).scalars()]
    slab = newest.join(SlabSliceRow, SlabSliceRow.content == ManifestContentRow.content)
    slab = slab.where(SlabSliceRow.slab == digest)
    scopes = select(SlabScopeRow.scope).where(SlabScopeRow.slab == digest).order_by(SlabScopeRow.scope)
    owners = [owner_of(scope) for scope in (await session.execute(scopes)).scalars()]
    for owner in [None] if None in owners else owners:
        query = slab if owner is None else slab.where(is_mirrored_for(owner, ManifestContentRow.manifest))
        found += [(manifest, owner) for manifest in (await session.execute(query)).scalars()]
    return found


async def keep_wrong_file(
    session: WriteSession,
    chunks: Iterable[Digest],
    *,
    mirror_id: str,
    source: str,
    path: str,
    size: int,
    expected: str,
    actual: str,
) -> str:
    """Remember what came in place of a file, and name it. So long as it is kept, its chunks are not collected."""
    name, raw = f"qua_{secrets.token_hex(12)}", b"".join(chunk.to_bytes() for chunk in chunks)
    session.add(
        QuarantinedFileRow(
            id=name,
            created_at=time.time(),
            mirror_id=mirror_id,
            source=source,
            path=path,
            size=size,
            expected=expected,
            actual=actual,
            chunks=raw,
        )
    )
    await session.flush()
    return name


async def narrow_evidence(session: WriteSession, name: str, right: Collection[Digest]) -> None:
    """Only what is not among these chunks was wrong. Without this, a right chunk would rest for as long as the evidence."""
    row = await session.get(QuarantinedFileRow, name)
    if row is not None:
        row.chunks = b"".join(raw for raw in split_digests(row.chunks) if Digest.from_bytes(raw) not in right)


async def count_wrong_files(session: ReadSession) -> int:
    """How many files are kept."""
    return (await session.execute(select(func.count()).select_from(QuarantinedFileRow))).scalar_one()
