"""The rules of chunks on real databases: mirrors, collections and an evictor at once, and a store whose DELETEs answer late or never.

All possible orders are the state machine's (``tests/property/test_registry_machine.py``); here are the locks and what READ COMMITTED does.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import event, select

from bdn.core.chunk import Digest
from bdn.core.manifest import Root
from bdn.mirror.db import chunks, manifests
from bdn.mirror.db.chunks import ChunkState, SetEndedError, SetState
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import Base, ChunkRow, ChunkSetRow, SetChunkRow
from tests.support.content.names import named
from tests.support.promises.tally import at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("collection")

ROUNDS: Final = at_scale(25, 200)  # of each mirror
DIGESTS: Final = [named(f"chunk {number}") for number in range(40)]
DEADLINE_SECONDS: Final = at_scale(300, 3_000)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/registry.sqlite"
    return str(request.getfixturevalue("empty_postgres_url"))


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield database
    await database.close()


@pytest.fixture(autouse=True)
def many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "AT_ONCE", 4)
    monkeypatch.setattr(chunks, "TAKEN_APART_AT_ONCE", 6)


@dataclass
class World:
    """A store that is a set, and a clock that tasks move on."""

    database: Database
    random: random.Random
    now: float = 1e6
    objects: set[Digest] = field(default_factory=set)
    deleted: list[Digest] = field(default_factory=list)  # in order
    late: list[tuple[float, Digest]] = field(default_factory=list)  # DELETEs, and by when they land
    published: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    collected: int = 0
    mirrors_left: int = 3

    def draw(self, most: int) -> list[Digest]:
        return self.random.sample(DIGESTS, self.random.randint(1, most))

    def delete(self, digest: Digest) -> None:
        self.objects.discard(digest)
        self.deleted.append(digest)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for bound, digest in self.late:
            if bound <= self.now and self.random.random() < 0.8:
                self.delete(digest)
        self.late = [(bound, digest) for bound, digest in self.late if bound > self.now]

    async def mirror(self, name: str) -> None:
        for number in range(ROUNDS):
            with suppress(SetEndedError):
                await self._mirror_once(f"{name}/{number}")
        self.mirrors_left -= 1

    async def _mirror_once(self, owner: str) -> None:
        async with self.database.write() as session:
            set_id = await chunks.of(session, chunks.begin, owner)
        self.filled.append(set_id)
        async with self.database.write() as session:
            held = await chunks.of(session, chunks.hold, set_id, self.draw(15))
        wanted = dict.fromkeys(self.draw(15), 1)
        named_by_set = set(held)
        while wanted:
            async with self.database.write() as session:
                acquired_at = self.now
                found = await chunks.of(session, chunks.acquire, set_id, wanted, acquired_at)
            if self.random.random() < 0.1:
                break  # its process died; the evictor ends the set
            await asyncio.sleep(0)
            if self.now < acquired_at + chunks.PUT_SECONDS:
                self.objects |= found.put
                async with self.database.write() as session:
                    await chunks.of(session, chunks.acquire, set_id, {}, 0.0, found.put)
                named_by_set |= found.put
            named_by_set |= found.stored
            wanted = dict.fromkeys(wanted.keys() - named_by_set, 1)
            if wanted and self.random.random() < 0.3:  # who waits for what is leaving
                self.pass_time(chunks.DELETE_SECONDS)
        else:
            async with self.database.write() as session:
                await chunks.of(session, chunks.publish, set_id)
            if set_id in self.filled:  # or the evictor is about to end it
                self.filled.remove(set_id)
                assert named_by_set <= self.objects, "published, and an object is missing"
                self.published.append(set_id)

    async def evict(self) -> None:
        while self.mirrors_left or self.published or self.filled:
            some = [self.published.pop() for _ in range(min(len(self.published), self.random.randint(0, 9)))]
            if self.filled and (self.random.random() < 0.1 or not self.mirrors_left):
                some.append(self.filled.pop(0))
            async with self.database.write() as session:
                await chunks.of(session, chunks.end, some, self.random.choice([chunks.NO_GRACE, self.now]))
            async with self.database.write() as session:  # one step a transaction, or two lock rows crosswise
                await chunks.of(session, chunks.take_apart)

    async def collect(self) -> None:
        while self.mirrors_left:
            await self.collect_once()

    async def collect_once(self) -> bool:
        async with self.database.write() as session:
            is_apart = not await chunks.of(session, chunks.take_apart)
        let_go_at = self.now
        async with self.database.write() as session:
            going = await chunks.of(session, chunks.collect, 0.0, let_go_at, 7)
        gone = []
        for chunk in going:
            if self.now >= (bound := let_go_at + chunks.DELETE_SECONDS):
                break
            if self.random.random() < 0.2:
                self.late.append((bound, chunk.digest))  # no answer
            else:
                self.delete(chunk.digest)
                gone.append(chunk)
        await asyncio.sleep(0)
        async with self.database.write() as session:
            await chunks.of(session, chunks.forget, gone, let_go_at)
        self.collected += len(gone)
        if self.random.random() < 0.1:
            self.pass_time(self.random.choice([chunks.DELETE_SECONDS, chunks.PUT_SECONDS]))
        return is_apart and not going

    async def check(self) -> None:
        while self.mirrors_left:
            await self.check_once()

    async def check_once(self) -> int:
        """What was deleted while the database answered may be in either. Returns how many rows there are."""
        objects, deleted = frozenset(self.objects), len(self.deleted)
        named_by = select(SetChunkRow.chunk_id).join(ChunkSetRow, ChunkSetRow.id == SetChunkRow.set_id)
        kept = named_by.where(ChunkSetRow.state.in_([SetState.FILLING, SetState.PUBLISHED]))
        async with self.database.read() as session:
            rows = (await session.execute(select(ChunkRow.digest, ChunkRow.state, ChunkRow.id.in_(kept)))).all()
        unclear = set(self.deleted[deleted:])
        is_known = {Digest.from_bytes(raw) for raw, _, _ in rows}
        is_named = {Digest.from_bytes(raw) for raw, state, is_kept in rows if is_kept and state == ChunkState.STORED}
        assert objects <= is_known | unclear, "an object has no row"
        assert is_named <= self.objects | unclear, "an object that is named is missing"
        return len(rows)


async def test_registry_under_load__loses_no_named_chunk_and_leaves_no_object_without_a_row(
    database: Database,
) -> None:
    world = World(database, random.Random(1))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        for number in range(world.mirrors_left):
            tasks.create_task(world.mirror(f"mir_{number}"))
        for work in (world.collect, world.collect, world.evict, world.check):
            tasks.create_task(work())
    assert world.collected
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await world.check_once():  # in the end all is given up, and everything goes
            world.pass_time(chunks.PUT_SECONDS)
            await world.collect_once()
    assert not world.objects


async def test_publish__of_a_set_of_many_chunks__touches_two_rows(database: Database) -> None:
    wanted, rows = dict.fromkeys(DIGESTS, 1), list[int]()
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, "mir_0/0")
        await chunks.of(session, chunks.acquire, set_id, wanted, 1e6)
        await chunks.of(session, chunks.acquire, set_id, {}, 0.0, wanted)
    async with database.write() as session:
        event.listen(
            database._engine.sync_engine, "after_cursor_execute", lambda *given: rows.append(max(0, given[1].rowcount))
        )
        await manifests.publish(session, set_id, Root(1, 1, ()), 1e6)
    assert sum(rows) <= 3, "more than the manifest, a look at it, and its set"
