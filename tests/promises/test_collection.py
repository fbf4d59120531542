"""What a manifest names is never collected, whoever copies, gives up, restores or is killed meanwhile; all else goes."""

import asyncio
import itertools
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import select

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.mirror.db import damaged, mirrors, removal
from bdn.mirror.db.tables import ContentRow, ManifestRow
from bdn.mirror.upkeep import retention
from tests.doubles.hub import Hub
from tests.support.content.calendar import Calendar
from tests.support.crash.rot import rot
from tests.support.mirror.collecting_world import (
    GRACE_SECONDS,
    ORGANISATIONS,
    TOMBSTONE_SECONDS,
    TREES,
    BucketWorld,
    Killed,
    World,
    manifest_of,
)
from tests.support.mirror.service import database_under_test, mirror_under_test, source
from tests.support.promises.tally import Tally, at_scale

pytestmark = pytest.mark.promise("collection")
pytest_plugins = ("tests.support.mirror.fixtures",)

_Result = TypeVar("_Result")
_MEMORY: Final = Path("/dev/shm")


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are small: as many transactions as a manifest of a million files takes, and as many looks as a store of a million chunks."""
    monkeypatch.setattr(removal, "SLABS_AT_ONCE", 1)
    monkeypatch.setattr(removal, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(retention, "CHUNKS_AT_ONCE", 2)


organisations = st.sampled_from(ORGANISATIONS)
trees = st.sampled_from(TREES)
# What others do while a collection stands at one of its steps.
deeds = st.sampled_from(["copy", "copy to the end", "fail", "evict", "restore", "kill"])


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bdn-collect-", dir=_MEMORY if _MEMORY.is_dir() else None))


@asynccontextmanager
async def a_world(kind: type[World] = World) -> AsyncIterator[World]:
    here = folder()
    try:
        async with database_under_test(here) as database:
            world = kind(here, database)
            try:
                yield world
            finally:
                await asyncio.to_thread(world.close)
    finally:
        shutil.rmtree(here)


async def do(world: World, deed: str, number: int) -> None:
    """One of the deeds, on whatever there is to do it to."""
    if deed == "kill":
        raise Killed
    if deed in ("copy", "copy to the end"):
        if not world.copies and world.take_over() is None:
            world.begin(ORGANISATIONS[number % 2], TREES[number % len(TREES)], private=number % 4 == 1)
        copy = world.copies[number % len(world.copies)]
        await (copy.step() if deed == "copy" else copy.finish())
    elif deed == "fail" and world.copies:
        await world.copies[number % len(world.copies)].fail("CANCELED" if number % 2 else "FAILED")
    elif world.promised:
        organisation, manifest = sorted(world.promised)[number % len(world.promised)]
        await (world.evict if deed == "evict" else world.restore)(organisation, manifest)


def dump(world: World) -> tuple[list[str], dict[str, tuple[int, float]]]:
    """All rows, and all files of the store with their times."""
    with closing(sqlite3.connect(world.folder / "mirror.sqlite")) as connection:
        rows = list(connection.iterdump())
    return rows, world.files()


class CollectionMachine(RuleBasedStateMachine):
    tally: Tally

    def __init__(self) -> None:
        super().__init__()
        self.folder = folder()
        self.runner = asyncio.Runner()
        self.opened = database_under_test(self.folder)
        self.checked = 0

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.runner.run(work)

    @initialize()
    def open(self) -> None:
        async def opened() -> World:
            return World(self.folder, await self.opened.__aenter__())

        self.world = self.run(opened())

    @rule(organisation=organisations, tree=trees, private=st.booleans(), steps=st.integers(1, 40))
    def copies(self, organisation: str, tree: str, private: bool, steps: int) -> None:
        async def some() -> None:
            copy = self.world.begin(organisation, tree, private=private)
            for _ in range(steps):
                if copy in self.world.copies:
                    await copy.step()

        self.run(some())

    @rule(deed=deeds.filter(lambda deed: deed != "kill"), number=st.integers(0, 100), times=st.integers(1, 4))
    def somebody_does(self, deed: str, number: int, times: int) -> None:
        async def some() -> None:
            for _ in range(times):
                await do(self.world, deed, number)

        self.run(some())

    @rule()
    def is_killed(self) -> None:
        self.run(_restarted(self.world))
        self.tally.add(restarts=1)

    @rule(seconds=st.sampled_from([10.0, GRACE_SECONDS + 61, TOMBSTONE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(plan=st.dictionaries(st.integers(0, 30), st.tuples(deeds, st.integers(0, 100)), max_size=5))
    def collects(self, plan: dict[int, tuple[str, int]]) -> None:
        if not plan:
            self.run(_rehearsed(self.world))
            return
        self.tally.add(faults=len(plan), restarts=self.run(collected_beside(self.world, plan)))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            self.checked += self.run(self.world.check())

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.run(_ended(self.world))
                self.tally.add(scenarios=1)
        finally:
            self.run(self.opened.__aexit__(None, None, None))
            self.runner.close()
            shutil.rmtree(self.folder)


async def _restarted(world: World) -> None:
    world.restart()


async def _rehearsed(world: World) -> Any:
    """A dry run changes nothing, and tells what the real one then does where nobody comes in between."""
    before = dump(world)
    planned = await world.collect(dry_run=True)
    assert dump(world) == before
    world.now -= 1
    assert await world.collect() == planned
    return planned


async def collected_beside(world: World, plan: dict[int, tuple[str, int]]) -> int:
    """A collection at whose steps others do what is planned; returns whether it was killed."""
    steps = iter(range(1000))

    async def gate(_: str) -> None:
        deed = plan.get(next(steps))
        if deed is not None:
            await do(world, *deed)
            await world.check()

    world.gate = gate
    try:
        await world.collect()
    except Killed:
        world.restart()
        return 1
    finally:
        world.gate = World.gate
    return 0


async def _ended(world: World) -> None:
    """All come to an end, and what is left is what somebody may read or have back; later nothing is left at all."""
    while world.take_over() is not None:
        pass
    for copy in list(world.copies):
        await copy.finish()
    await world.check()
    world.now += GRACE_SECONDS + 61
    await world.collect()
    await world.check()
    await world.check_that_nothing_else_is_kept()
    for organisation, manifest in list(world.promised):
        await world.evict(organisation, manifest)
    world.now += TOMBSTONE_SECONDS
    await world.collect()
    assert (world.promised, list(world.store.stored())) == ({}, [])
    with closing(sqlite3.connect(world.folder / "mirror.sqlite")) as connection:
        for table in ("manifests", "contents", "identities", "slabs", "slab_slices", "copied_chunks"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        said = connection.execute("SELECT DISTINCT manifest FROM events WHERE kind = 'collected'")
        assert {manifest for (manifest,) in said} == world.manifests.keys(), "what went is not on record"


def test_whatever_happens_nothing_named_goes_and_nothing_else_stays(tally: Tally) -> None:
    CollectionMachine.tally = tally
    run_state_machine_as_test(
        CollectionMachine,
        settings=settings(
            max_examples=at_scale(6, 60),
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


async def _with_work_to_do(world: World) -> None:
    """Something of each kind that a collection takes, beside something that shares its chunks and stays."""
    await world.begin("acme", "ABy", private=False).finish()
    await world.begin("rival", "Cxyz", private=True).finish()
    await world.begin("acme", "Ax", private=False).finish()
    failing = world.begin("rival", "DB", private=True)
    for _ in range(13):
        await failing.step()
    await failing.fail()
    for organisation, manifest in list(world.promised):
        if len(world.manifests[manifest].files) != 2:
            await world.evict(organisation, manifest)
    world.now += TOMBSTONE_SECONDS + 1


@pytest.mark.parametrize(("kind", "subset", "steps"), [
    (World, 15, {"a chunk that lies aside"}),
    (BucketWorld, 19, {"a marker that was written", "a chunk that is about to go", "a chunk that went"}),
])  # fmt: skip
async def test_at_each_step_of_a_collection_others_may_act_and_it_may_be_killed(
    tally: Tally, kind: type[World], subset: int, steps: set[str]
) -> None:
    names: list[str] = []

    async def gate(name: str) -> None:
        names.append(name)

    async with a_world(kind) as world:
        await _with_work_to_do(world)
        world.gate = gate
        await world.collect()
    assert set(names) >= {"a chunk", "a look at rows", "rows went", "a look at chunks"} | steps
    every = [(step, deed, number) for step in range(len(names)) for deed, number in _DEEDS]
    if kind is BucketWorld:  # the same collection takes the same rows: only how chunks go is another
        moments = {"a chunk", "a chunk that is about to go"}
        trees = [("copy to the end", number) for number in range(len(TREES))]
        every = [(step, *deed) for deed in (*trees, ("kill", 0)) for step, name in enumerate(names) if name in moments]
    for step, deed, number in every[:: at_scale(max(1, len(every) // subset), 3)]:
        async with a_world(kind) as world:
            await _with_work_to_do(world)
            killed = await collected_beside(world, {step: (deed, number), step + 2: ("copy", number)})
            tally.add(scenarios=1, faults=1 - killed, restarts=killed)
            try:
                await world.check()
                await _ended(world)
            except AssertionError as error:
                error.add_note(f"step {step} ({names[step]}): {deed} {number}")
                raise


async def test_a_purge_that_is_killed_is_gone_on_with_by_the_next_one() -> None:
    """Also by one that takes only what was given up, and no draft that is merely old."""

    async def kill(_: World) -> None:
        raise Killed

    for step in range(await _steps_of_a_purge()):
        async with _purged(step, kill) as world:
            world.restart()
            await world.collector().collect(grace_seconds=None)
            async with world.database.read() as session:
                for column in (ManifestRow.digest, ContentRow.digest):
                    assert (await session.execute(select(column))).all() == []


async def test_who_mirrors_again_what_is_being_collected_has_it_whole() -> None:
    async def mirror(world: World) -> None:
        await world.begin("acme", "ABy", private=False).finish()

    for step in range(await _steps_of_a_purge()):
        async with _purged(step, mirror) as world:
            assert list(world.promised.values()) == [None]
            assert await world.check() == 3


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
    """A manifest is given up and purged; after the transaction of this number, or after each, comes the deed."""
    done = itertools.count()

    async def gate(name: str) -> None:
        if name == "rows went" and step in (next(done), None):
            await deed(world)

    async with a_world() as world:
        await world.begin("acme", "ABy", private=False).finish()
        for organisation, manifest in list(world.promised):
            await world.evict(organisation, manifest)
        world.now += TOMBSTONE_SECONDS + 1
        world.gate = gate
        with suppress(Killed):
            await world.collector().collect(grace_seconds=None)
        world.gate = World.gate
        yield world


# Copies of each tree by each organisation, public and private; evictions, restorations, kills.
_DEEDS: Final = [
    *(("copy to the end", number) for number in range(10)),
    *(("copy", number) for number in range(4)),
    *(("restore", number) for number in range(3)),
    ("evict", 2),
    ("kill", 0),
]


async def test_what_is_planned_in_a_dry_run_is_of_every_kind() -> None:
    async with a_world() as world:
        await _with_work_to_do(world)
        world.store.put(digest_of(b"nobody's"), bytearray(b"nobody's"))
        left = world.folder / "store/incoming/left"
        left.write_bytes(b"half-written")
        os.utime(left, (1.0, 1.0))
        world.now += 10 * TOMBSTONE_SECONDS
        planned = await _rehearsed(world)
        counted = Counter({kind: count for kind, count in planned.counts.items() if count})
        assert counted == {"manifests": 2, "contents": 1, "half_copied": 1, "chunks": 1, "incoming": 1}


async def test_a_slab_goes_when_who_may_read_it_reads_nothing_of_it_though_others_have_its_files_elsewhere() -> None:
    """And stays while a mirror of theirs is at work, which counts on it, or while what they gave up can be restored."""
    async with a_world() as world:
        await world.begin("acme", "Cxyz", private=True).finish()
        common = {chunk.digest for chunk in world.store.stored()}
        copy = world.begin("rival", "yz", private=True)
        while not {chunk.digest for chunk in world.store.stored()} - common:
            await copy.step()
        await copy.step()  # which records it
        (slab,) = {chunk.digest for chunk in world.store.stored()} - common
        world.now += 10 * TOMBSTONE_SECONDS
        assert not any((await _rehearsed(world)).bytes.values())
        world.check_object(slab)
        await copy.fail()
        assert not any((await _rehearsed(world)).bytes.values())  # who asks again has it
        world.now += GRACE_SECONDS + 1
        assert (await _rehearsed(world)).bytes["contents"] == len(b"yyyzzzz")
        with pytest.raises(NotFoundError):
            world.check_object(slab)
        # What is known of its files does not lead to a slab that is gone.
        await world.begin("rival", "yz", private=True).finish()
        manifest = manifest_of("yz").digest.hex
        assert world.promised["rival", manifest] is None
        await world.evict("rival", manifest)
        world.now += TOMBSTONE_SECONDS - 10
        assert not any((await _rehearsed(world)).bytes.values())
        await world.restore("rival", manifest)
        await _ended(world)


async def test_orphans_alone_are_told_and_collected_beside_what_else_would_go() -> None:
    async with a_world() as world:
        await _with_work_to_do(world)
        orphan = digest_of(b"nobody's")
        world.store.put(orphan, bytearray(b"nobody's"))
        world.now += 10 * TOMBSTONE_SECONDS
        rows, _ = dump(world)
        for dry_run in (True, False):
            told = await world.collect(dry_run=dry_run, only_orphans=True)
            assert {kind: (count, told.bytes[kind]) for kind, count in told.counts.items() if count} == {
                "chunks": (1, 8)
            }
        assert orphan not in {chunk.digest for chunk in world.store.stored()}
        assert dump(world)[0] == rows
        whole = await world.collect()
        assert (whole.counts["manifests"], whole.counts["chunks"]) == (2, 0)


async def test_that_a_chunk_was_damaged_is_forgotten_with_it_unless_a_mirror_at_work_may_count_on_it() -> None:
    async with a_world() as world:

        async def known() -> list[str]:
            async with world.database.read() as session:
                return [row.digest for row in await damaged.all_damaged(session)]

        await world.begin("acme", "A", private=False).finish()
        shared = digest_of(b"2")
        counting = world.begin("rival", "C", private=False)  # has it before it is found, and records it later
        while shared not in counting.counted:
            await counting.step()
        world.now += 1
        async with world.database.write() as session:
            await mirrors.hold_claims(session)
            assert await damaged.register(session, shared, world.now, "its bytes are others")
        ((organisation, manifest),) = world.promised
        await world.evict(organisation, manifest)
        world.now += TOMBSTONE_SECONDS + 61
        for dry_run in (True, False):
            await world.collect(dry_run=dry_run)
            assert await known() == [shared.hex]
        await counting.fail()
        await world.collect(dry_run=True)
        assert await known() == [shared.hex]
        await world.collect()
        assert await known() == []


async def test_a_copy_that_takes_longer_than_the_grace_loses_nothing_at_any_of_its_steps(tally: Tally) -> None:
    for steps in range(1, 14):
        async with a_world() as world:
            copy = world.begin("acme", "DB", private=False)
            for _ in range(steps):
                await copy.step()
            world.now += 10 * GRACE_SECONDS
            await world.collect()
            await world.check()
            await copy.finish()
            await world.check()
            tally.add(scenarios=1)


_LICENCE: Final = b"the licence that every repository has"


@pytest.mark.production
@pytest.mark.usefixtures("backend")
async def test_a_slab_whose_files_lie_damaged_elsewhere_stays_for_whoever_needs_them(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    one, calendar = hub.repo("org/one"), Calendar()
    first = one.commit({"a.txt": b"of the first revision", "LICENSE": _LICENCE})
    second = one.commit({"a.txt": None})
    two = hub.repo("org/two")
    two.commit({"b.txt": b"of another repository", "LICENSE": _LICENCE})
    async with mirror_under_test(tmp_path / "mirror", clock=calendar, collect_seconds=0, scrub_seconds=0) as mirror:
        old = (await mirror.ready(source(f"hf://org/one@{first}")))["sources"][0]["manifest"]
        (ours,) = mirror.chunks()
        new = (await mirror.ready(source(f"hf://org/one@{second}")))["sources"][0]["manifest"]
        await mirror.ready(source("hf://org/two"))
        (theirs,) = mirror.chunks().keys() - {ours}
        with mirror.behind.chunk(Digest(Path(theirs).name)) as stored:
            rot(stored, "flipped")
        await mirror.verify(repair=False)
        two.disabled = True
        evicted = await mirror.evict(manifest=old, tier="mirror")
        calendar.days = 8
        await mirror.collect(grace_seconds=0)
        assert (await mirror.http.get(f"/manifests/{old}")).status_code == 404
        tally.add(scenarios=1, faults=1, lost=ours not in mirror.chunks())
        assert evicted["bytes_freed"] == 0
        layout = (await mirror.http.get(f"/manifests/{new}/layout")).json()
        (place,) = [file["slab"] for file in layout["files"]]
        slab = (await mirror.http.get(f"/chunks/{place['digest']}")).content
        assert slab[place["offset"] :][: len(_LICENCE)] == _LICENCE
