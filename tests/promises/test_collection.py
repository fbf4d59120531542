"""What a manifest names is never collected, whoever copies, gives up, restores or is killed meanwhile; all else goes."""

import itertools
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.mirror.db import chunks, mirrors
from bdn.mirror.db.chunks import DELETE_SECONDS
from bdn.mirror.db.collection import plan
from bdn.mirror.db.tables import QuarantinedFileRow
from tests.support.content.calendar import DAY
from tests.support.mirror.collecting_world import (
    GRACE_SECONDS,
    ORGANISATIONS,
    TOMBSTONE_SECONDS,
    TREES,
    Killed,
    World,
    tree_of,
)
from tests.support.mirror.service import database_under_test
from tests.support.promises.tally import Tally, at_scale

pytestmark = pytest.mark.promise("collection")

_MEMORY: Final = Path("/dev/shm")


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are small: as many transactions as manifests of a million chunks take."""
    monkeypatch.setattr(chunks, "TAKEN_APART_AT_ONCE", 2)
    monkeypatch.setattr(chunks.collect, "__defaults__", (2,))


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    memory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="bdn-collect-", dir=memory) as name:
        async with database_under_test(Path(name)) as database:
            yield World(Path(name), database)


async def do(world: World, deed: str, number: int) -> None:
    """One of the deeds, on whatever there is to do it to."""
    if deed == "kill":
        raise Killed
    if deed == "no answer":
        world.unanswered += 1 + number % 3
    elif deed in ("copy", "copy to the end"):
        if not world.copies and world.take_over() is None:
            world.begin(ORGANISATIONS[number % 2], TREES[number % len(TREES)])
        copy = world.copies[number % len(world.copies)]
        await (copy.step() if deed == "copy" else copy.finish())
    elif world.promised:
        organisation, manifest = sorted(world.promised)[number % len(world.promised)]
        if deed == "restore":
            await world.restore(organisation, manifest)
        else:
            await world.evict(organisation, manifest)


def dump(world: World) -> tuple[list[str], dict[str, tuple[int, float]]]:
    """All rows, and all files of the store with their times."""
    with closing(sqlite3.connect(world.folder / "mirror.sqlite")) as connection:
        rows = list(connection.iterdump())
    return rows, world.files()


async def _planned(world: World) -> Any:
    """A dry run changes nothing, and tells what the real one then does where nobody comes in between."""
    before = dump(world)
    planned = await world.collect(dry_run=True)
    assert dump(world) == before
    world.now -= 1
    assert await world.collect() == planned
    return planned


async def collected_beside(world: World, plan: dict[int, tuple[str, int]]) -> int:
    """A collection at whose steps others do what is planned; returns whether it was killed."""
    steps = iter(range(10_000))

    async def gate(_: str) -> None:
        deed = plan.get(next(steps))
        if deed is not None:
            world.gate = World.gate
            await do(world, *deed)
            await world.check()
            world.gate = gate

    world.gate = gate
    try:
        with suppress(StoreUnavailableError):
            await world.collect()
    except Killed:
        world.restart()
        return 1
    finally:
        world.gate = World.gate
    return 0


async def _ended(world: World) -> None:
    """All come to an end, and what is left is what somebody may read or have back; later nothing is left at all."""
    world.unanswered = 0
    while world.take_over() is not None:
        pass
    while world.copies:
        for copy in list(world.copies):
            await copy.finish()
        if world.copies:  # they wait for chunks that leave
            world.now += DELETE_SECONDS
            await world.collect()
    await world.check()
    world.now += GRACE_SECONDS + 1
    await world.collect()
    await world.check()
    await world.check_that_nothing_else_is_kept()
    for organisation, manifest in list(world.promised):
        await world.evict(organisation, manifest)
    world.now += TOMBSTONE_SECONDS
    await world.collect()
    assert world.promised == {}
    await world.check_that_nothing_else_is_kept()
    with closing(sqlite3.connect(world.folder / "mirror.sqlite")) as connection:
        for table in ("manifests", "chunk_sets", "set_chunks"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        said = connection.execute("SELECT DISTINCT manifest FROM events WHERE kind = 'collected'")
        assert {manifest for (manifest,) in said} == world.manifests.keys(), "what went is not on record"


async def _with_work_to_do(world: World) -> None:
    """Something of each kind that a collection takes, beside something that shares its chunks and stays."""
    await world.begin("acme", "ABy").finish()
    await world.begin("rival", "Cxyz").finish()
    await world.begin("acme", "Ax").finish()
    failing = world.begin("rival", "DB")
    for _ in range(13):
        await failing.step()
    await failing.fail()
    for organisation, manifest in list(world.promised):
        if world.manifests[manifest] != "Ax":
            await world.evict(organisation, manifest)
    world.now += TOMBSTONE_SECONDS + 1


# Copies of each tree by each organisation; evictions, restorations, kills, deletions that get no answer.
_DEEDS: Final = [
    *(("copy to the end", number) for number in range(10)),
    *(("copy", number) for number in range(4)),
    *(("restore", number) for number in range(3)),
    ("evict", 2),
    ("kill", 0),
    ("no answer", 0),
    ("no answer", 1),
]


async def test_at_each_step_of_a_collection_others_may_act_and_it_may_be_killed(tally: Tally) -> None:
    names: list[str] = []

    async def gate(name: str) -> None:
        names.append(name)

    async with a_world() as world:
        await _with_work_to_do(world)
        world.gate = gate
        await world.collect()
    assert {*names} >= {"a look at rows", "rows go", "rows went", "a chunk is about to go", "a chunk went"}
    every = [(step, deed, number) for step in range(len(names)) for deed, number in _DEEDS]
    for step, deed, number in every[:: at_scale(max(1, len(every) // 10), 3)]:
        async with a_world() as world:
            await _with_work_to_do(world)
            killed = await collected_beside(world, {step: (deed, number), step + 2: ("copy", number)})
            tally.add(scenarios=1, faults=1 - killed, restarts=killed)
            try:
                await world.check()
                world.carry_out()
                await world.check()
                await _ended(world)
            except AssertionError as error:
                error.add_note(f"step {step} ({names[step]}): {deed} {number}")
                raise


async def test_a_purge_that_is_killed_is_gone_on_with_by_the_next_one() -> None:
    """Also by one that takes only what was given up, and nothing that is merely old."""

    async def kill(_: World) -> None:
        raise Killed

    for step in range(await _steps_of_a_purge()):
        async with _purged(step, kill) as world:
            world.restart()
            world.now += DELETE_SECONDS
            await world.collector().collect(grace_seconds=None)
            await world._notice(world.manifests)
            await world.check_that_nothing_else_is_kept()
            assert list(world.store.listed()) == []


async def test_what_is_restored_before_it_is_dropped_stays() -> None:
    found = list[float | None]()

    async def restore(world: World) -> None:
        await world.restore("acme", tree_of("ABy")[0].digest.hex)

    for step in range(await _steps_of_a_purge()):
        async with _purged(step, restore) as world:
            await world.check()
            found += world.promised.values()
    assert found == [None]  # it can be restored after the first look, and not once it is dropped


async def _steps_of_a_purge() -> int:
    steps = itertools.count(1)

    async def count(_: World) -> None:
        next(steps)

    async with _purged(None, count):
        found = next(steps) - 1
    assert found > 5
    return found


@asynccontextmanager
async def _purged(step: int | None, deed: Callable[[World], Awaitable[None]]) -> AsyncIterator[World]:
    """A manifest is given up and purged; after the look or transaction of this number, or after each, comes the deed."""
    done = itertools.count()

    async def gate(name: str) -> None:
        if name in ("rows were looked at", "rows went") and step in (next(done), None):
            await deed(world)

    async with a_world() as world:
        await world.begin("acme", "ABy").finish()
        for organisation, manifest in list(world.promised):
            await world.evict(organisation, manifest)
        world.now += TOMBSTONE_SECONDS + 1
        world.gate = gate
        with suppress(Killed):
            await world.collector().collect(grace_seconds=None)
        world.gate = World.gate
        yield world


async def test_what_is_planned_in_a_dry_run_is_of_every_kind() -> None:
    async with a_world() as world:
        await _with_work_to_do(world)
        left = world.folder / "store/incoming/left"
        left.write_bytes(b"half-written")
        os.utime(left, (1.0, 1.0))
        for name, days in (("old", 31), ("young", 29)):
            await _keep_evidence(world, name, digest_of(name.encode()), world.now - days * DAY)
        planned = await _planned(world)
        chunks_gone = planned.counts.pop("chunks")
        assert planned.counts == {"manifests": 2, "evidence": 1, "incoming": 1}
        assert chunks_gone > len({**tree_of("ABy")[1], **tree_of("Cxyz")[1]}.keys() - tree_of("Ax")[1].keys())
        kept = {chunk.digest for chunk in world.store.listed()} & {digest_of(b"old"), digest_of(b"young")}
        assert kept == {digest_of(b"young")}


async def _keep_evidence(world: World, name: str, chunk: Digest, at: float) -> None:
    """A file came wrong, and is kept for people."""
    wrong = QuarantinedFileRow(
        id=name, created_at=at, mirror_id="mir", source="s", path="p", size=1, expected="e", actual="a"
    )
    async with world.database.write() as session:
        session.add(wrong)
        set_id = await chunks.of(session, chunks.begin, f"evidence:{name}")
        await chunks.of(session, chunks.acquire, set_id, {chunk: len(name)}, at)
        world.store.put(chunk, bytearray(name.encode()))
        await chunks.of(session, chunks.acquire, set_id, {}, 0.0, [chunk])
        await chunks.of(session, chunks.publish, set_id)


async def test_what_a_manifest_frees__a_chunk_that_another_one_shares__counts_with_the_last_of_them() -> None:
    async with a_world() as world:
        for tree in ("DB", "B"):
            await world.begin("acme", tree).finish()
        async with plan(world.database) as planned:
            freed = [await planned.freed(tree_of(tree)[0].digest.hex) for tree in ("DB", "B")]
        alone, shared = tree_of("DB")[1], tree_of("B")[1]
        assert freed == [sum(len(alone[one]) for one in alone.keys() - shared), sum(map(len, shared.values()))]


async def test_neither_an_open_push_nor_a_dead_worker_delays_what_others_gave_up() -> None:
    async with a_world() as world:
        await world.begin("acme", "Cxyz").finish()
        copies = world.begin("rival", "Ax"), world.begin("rival", "DB")
        assert {copy.number % 2 for copy in copies} == {0, 1}  # one is a push
        for copy in copies:
            for _ in range(8):
                await copy.step()
        world.restart()  # both claims run out, and nothing takes their mirrors over
        ((organisation, manifest),) = world.promised
        await world.evict(organisation, manifest, purge=True)
        assert world.promised == {}
        left = {one.digest for one in world.store.listed()}
        assert left
        assert left.isdisjoint(tree_of("Cxyz")[1].keys() - tree_of("Ax")[1].keys())
        await _ended(world)


async def test_the_grace_of_a_chunk_begins_when_the_last_set_that_referred_to_it_ended() -> None:
    async with a_world() as world:
        first, last = world.begin("acme", "B"), world.begin("rival", "B")
        for copy in (first, last):
            for _ in range(20):
                if len(copy.counted) < 2:
                    await copy.step()
        await last.fail()
        world.now += GRACE_SECONDS + 1
        await first.fail()
        world.now += GRACE_SECONDS - 10
        assert not (await _planned(world)).counts["chunks"]
        world.now += 20
        assert (await _planned(world)).counts["chunks"]
        await world.check_that_nothing_else_is_kept()


@pytest.mark.parametrize("is_collected", [True, False])
async def test_a_chunk_whose_deletion_got_no_answer_is_deleted_or_put_again_once_that_has_expired(
    is_collected: bool,
) -> None:
    async with a_world() as world:
        await world.begin("acme", "B").finish()
        ((organisation, manifest),) = world.promised
        world.unanswered = 1
        with pytest.raises(StoreUnavailableError):
            await world.evict(organisation, manifest, purge=True)
        assert len(list(world.store.listed())) == 1
        copy = world.begin("rival", "B")
        await copy.finish()
        assert copy.is_waiting
        await world.collect()
        world.carry_out()  # it is no loss
        await copy.finish()
        assert copy.is_waiting
        world.now += DELETE_SECONDS
        if is_collected:
            await world.collect()
        await copy.finish()
        assert await world.check() == len(tree_of("B")[1])
        await _ended(world)


async def test_orphans_alone_are_told_and_collected_beside_what_else_would_go() -> None:
    async with a_world() as world:
        await _with_work_to_do(world)
        orphan = digest_of(b"nobody's")
        world.store.put(orphan, bytearray(b"nobody's"))
        rows, _ = dump(world)
        for dry_run in (True, False):
            told = await world.collect(dry_run=dry_run, only_orphans=True)
            assert {kind: (count, told.bytes[kind]) for kind, count in told.counts.items() if count} == {
                "chunks": (1, 8)
            }
        assert orphan not in {chunk.digest for chunk in world.store.listed()}
        assert [row for row in dump(world)[0] if "sqlite_sequence" not in row] == [
            row for row in rows if "sqlite_sequence" not in row
        ]
        world.store.put(orphan, bytearray(b"nobody's"))
        assert (await world.collect()).counts["manifests"] == 2
        assert orphan in {
            chunk.digest for chunk in world.store.listed()
        }  # a collection that is not asked for orphans lists no store


async def test_what_a_mirror_puts_while_orphans_are_looked_for_stays() -> None:
    """At each step: a listing is old, and what it names may have a row by then."""
    for step in range(8):
        async with a_world() as world:
            world.store.put(digest_of(b"1"), bytearray(b"1"))  # an orphan that a mirror is about to put
            steps = itertools.count()

            async def gate(_: str, step: int = step, steps: Any = steps, world: World = world) -> None:
                if next(steps) == step:
                    await world.begin("acme", "B").finish()

            world.gate = gate
            await world.collect(only_orphans=True)
            world.gate = World.gate
            for copy in list(world.copies):
                await copy.finish()
            if world.promised:
                assert await world.check() == len(tree_of("B")[1])


async def test_a_manifest_that_no_mirror_names_goes_when_it_is_as_old_as_an_eviction_keeps_it() -> None:
    async with a_world() as world:
        await world.begin("acme", "B").finish()
        async with world.database.write() as session:
            await mirrors.prune(session, world.now + 1)  # which keeps the newest mirror of what is published
        world.now += TOMBSTONE_SECONDS + 1
        await world.collect()
        assert await world.check()
