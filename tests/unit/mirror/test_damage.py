"""What a scrub walks, what it registers, and which damage is reported."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import select, update

from bdn.core.chunk import Digest
from bdn.mirror.db import chunks, damaged
from bdn.mirror.db.damaged import ScrubState
from bdn.mirror.db.database import Database, insert_new
from bdn.mirror.db.tables import ChunkRow, EventRow, ManifestRow
from tests.support.content.names import named
from tests.support.mirror.service import database_under_test

A, B, C, D = (named(name) for name in "abcd")
ONE, TWO = named("manifest one"), named("manifest two")


async def publish(database: Database, manifest: Digest, *digests: Digest) -> int:
    """A manifest whose set refers to these chunks, all of them stored."""
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, manifest.hex)
        await chunks.of(session, chunks.acquire, set_id, dict.fromkeys(digests, 10), 0.0)
        await chunks.of(session, chunks.acquire, set_id, {}, 0.0, digests)
        await chunks.of(session, chunks.publish, set_id)
        row = {"digest": manifest.hex, "set_id": set_id, "files_total": 1, "bytes_total": 1}
        await insert_new(session, ManifestRow, [row | {"created_at": 0.0, "last_used": 0.0}])
    return set_id


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with database_under_test(tmp_path) as database:
        await publish(database, ONE, A, B)
        await publish(database, TWO, B, C)
        yield database


async def walked(database: Database, names: Sequence[str] | None, wanted: int = 1) -> list[Digest]:
    found: list[Digest] = []
    cursor = 0
    while True:
        async with database.read() as session:
            part = await damaged.after(session, cursor, names, wanted)
        if not part:
            return found
        assert len(part) <= wanted
        found += [chunk.digest for chunk in part]
        cursor = part[-1].id


async def ids(database: Database) -> dict[Digest, int]:
    async with database.read() as session:
        rows = (await session.execute(select(ChunkRow.digest, ChunkRow.id))).all()
    return {Digest.from_bytes(raw): number for raw, number in rows}


async def mark(database: Database, digest: Digest, chunk_id: int | None = None) -> bool:
    chunk_id = chunk_id or (await ids(database))[digest]
    async with database.write() as session:
        return await damaged.mark(session, digest, chunk_id, "it is absent", 5.0)


async def kinds(database: Database, digest: Digest) -> list[tuple[str, str | None]]:
    async with database.read() as session:
        query = select(EventRow.kind, EventRow.manifest).where(EventRow.digest == digest.hex)
        return sorted((kind, manifest) for kind, manifest in (await session.execute(query)).all())


@pytest.mark.parametrize("wanted", [1, 2, 10])
async def test_a_walk_meets_each_chunk_once_in_the_order_of_ids(database: Database, wanted: int) -> None:
    order = sorted((A, B, C), key=(await ids(database)).__getitem__)
    both = [ONE.hex, TWO.hex]
    assert await walked(database, None, wanted) == await walked(database, both, wanted) == order
    assert await walked(database, [ONE.hex], wanted) == [one for one in order if one != C]
    assert await walked(database, [named("none").hex], wanted) == []


async def test_a_walk_meets_what_is_damaged_and_not_what_is_being_put_or_nothing_refers_to(database: Database) -> None:
    await mark(database, A)
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, "mir_1")
        await chunks.of(session, chunks.acquire, set_id, {D: 10}, 0.0)
        await session.execute(update(ChunkRow).where(ChunkRow.digest == C.to_bytes()).values(refs=0))
    assert set(await walked(database, None)) == {A, B}


async def test_damage_is_registered_of_the_row_that_was_read_once_and_for_all_manifests(database: Database) -> None:
    assert not await mark(database, B, 999), "it was deleted and put again since"
    assert await mark(database, B)
    assert not await mark(database, B)
    assert await kinds(database, B) == sorted([("damaged", ONE.hex), ("damaged", TWO.hex)])
    async with database.read() as session:
        assert await damaged.reasons(session, [A, B]) == {B: "it is absent"}
        assert await damaged.count(session) == 1


async def test_a_damaged_chunk_that_is_put_again_is_repaired_and_a_loss_is_recorded_once(database: Database) -> None:
    await mark(database, A)
    async with database.read() as session:
        [damage] = await damaged.named(session, [A, B])
    for _ in range(2):
        async with database.write() as session:
            await damaged.record_loss(session, damage, 6.0)
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, "repair:1")
        await chunks.of(session, chunks.acquire, set_id, {A: 10}, 7.0)
        await damaged.acquire(session, set_id, {}, 7.0, [A, B])
    assert await kinds(database, A) == [("damaged", ONE.hex), ("lost", ONE.hex), ("repaired", ONE.hex)]
    assert await kinds(database, B) == []
    async with database.read() as session:
        assert await damaged.named(session) == []


async def test_damage_of_what_no_manifest_names_is_not_reported(database: Database) -> None:
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, "mir_1/0/listing")
        await chunks.of(session, chunks.acquire, set_id, {D: 10}, 0.0)
        await chunks.of(session, chunks.acquire, set_id, {}, 0.0, [D])
    assert await mark(database, D)
    async with database.read() as session:
        assert (await damaged.named(session), await damaged.count(session)) == ([], 0)
        assert await damaged.reasons(session, [D]) == {D: "it is absent"}


async def test_how_far_a_scrub_is_survives(database: Database) -> None:
    async with database.read() as session:
        assert await damaged.scrub_state(session) is None
    for state in (ScrubState(1.0, None, 7), ScrubState(1.0, 2.0)):
        async with database.write() as session:
            await damaged.save_scrub_state(session, state)
        async with database.read() as session:
            assert await damaged.scrub_state(session) == state
