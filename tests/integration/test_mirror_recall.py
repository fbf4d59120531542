"""What was published is found by its key, whatever the number of earlier mirrors, and stays when old mirrors are forgotten."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, select
from sqlalchemy.engine import Connection, Engine

from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.recall import held_in, is_update_in, note_use_in
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.wire.mirror_schema import MirrorSource, WeightsSourceBody
from tests.doubles.hub import Hub
from tests.support.mirror.service import LONGEST_SECONDS, MirrorUnderTest, mirror_under_test, source

pytest_plugins = ("tests.support.mirror.fixtures",)
MODEL = source("hf://org/model")
EARLIER = 300


@pytest.fixture
async def mirror(
    upstreams: None, hub: Hub, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    hub.repo("org/model").commit({"config.json": b"{}"})
    async with mirror_under_test(tmp_path / "mirror", **database_options) as mirror:
        yield mirror


@pytest.fixture
async def database(
    mirror: MirrorUnderTest, database_options: dict[str, Any], tmp_path: Path
) -> AsyncIterator[Database]:
    url = database_options.get("database_url", f"sqlite+aiosqlite:///{tmp_path}/mirror/mirror.sqlite")
    database = Database(url)
    yield database
    await database.close()


async def mirrored_often(database: Database, mirror_id: str) -> None:
    """The same mirror, many times before."""
    async with database.write() as session:
        row = (await session.execute(select(MirrorRow.__table__).where(MirrorRow.id == mirror_id))).mappings().one()
        part = select(MirrorSourceRow.__table__).where(MirrorSourceRow.mirror_id == mirror_id)
        part_row = (await session.execute(part)).mappings().one()
        names = [f"mir_{number:024x}" for number in range(EARLIER)]
        await session.execute(insert(MirrorRow), [{**row, "id": name, "created_at": 1.0} for name in names])
        await session.execute(insert(MirrorSourceRow), [{**part_row, "mirror_id": name} for name in names])


@contextmanager
def watched() -> Iterator[tuple[list[object], list[tuple[str, Any]]]]:
    """The sources that are loaded, and the statements."""
    loaded: list[object] = []
    statements: list[tuple[str, Any]] = []

    def load(row: object, _: object) -> None:
        loaded.append(row)

    def executed(_: Connection, __: Any, statement: str, given: Any, *___: Any) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, given))

    event.listen(MirrorSourceRow, "load", load)
    event.listen(Engine, "after_cursor_execute", executed)
    try:
        yield loaded, statements
    finally:
        event.remove(MirrorSourceRow, "load", load)
        event.remove(Engine, "after_cursor_execute", executed)


async def test_a_known_commit_is_recalled_by_a_key_whatever_was_mirrored_before(
    mirror: MirrorUnderTest, database: Database, hub: Hub
) -> None:
    first = await mirror.ready(MODEL)
    await mirrored_often(database, first["id"])
    hub.log.clear()
    with watched() as (loaded, _):
        again = await mirror.ready(source("hf://org/model", "/other"))
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert hub.log.count("tree") == 0
    assert len(loaded) < EARLIER // 10


async def test_whether_a_manifest_may_be_read_is_a_look_at_an_index(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    async with mirror_under_test(tmp_path) as mirror:
        manifest = (await mirror.manifest(MODEL)).removeprefix("b3:")
        database = Database(f"sqlite+aiosqlite:///{tmp_path}/mirror.sqlite")
        with watched() as (_, statements):
            async with database.read() as session:
                assert await mirrors.may_read(session, "default", manifest)
                assert not await mirrors.may_read(session, "other", manifest)
        await database.close()
    with closing(sqlite3.connect(tmp_path / "mirror.sqlite")) as connection:
        statements = [one for one in statements if "mirror_sources" in one[0]]  # the mirror's own work is noted, too
        plans = [row[3] for one in statements for row in connection.execute(f"EXPLAIN QUERY PLAN {one[0]}", one[1])]
    assert len(statements) == 2
    assert not [step for step in plans if step.startswith("SCAN")]
    assert not [step for step in plans if "SEARCH mirrors " in step]  # of which an organisation has very many
    assert sum("ix_mirror_sources_readable (organisation=? AND manifest=?)" in step for step in plans) == 2


async def test_old_mirrors_are_forgotten_and_what_is_published_is_read_and_recalled(
    mirror: MirrorUnderTest, database: Database, hub: Hub
) -> None:
    repository = hub.repo("org/model")
    repository.commit({"config.json": b"{}"})
    replaced, failed = await mirror.ready(MODEL), await mirror.mirror(source("hf://org/absent"))
    newest = await mirror.ready(MODEL)
    narrow = await mirror.ready(source("hf://org/model", allow_patterns=["*.json"]))
    repository.commit({"config.json": b"[]"})
    other = await mirror.ready(MODEL)
    now = time.time()
    async with database.write() as session:
        assert await mirrors.prune(session, 1.0) == 0
        assert await mirrors.prune(session, now + 1) == 2
        assert await mirrors.prune(session, now + 1) == 0
    async with asyncio.timeout(LONGEST_SECONDS):
        for gone in (replaced, failed):  # what is shown of a mirror that has ended may be half a second old
            while (await mirror.http.get(f"/mirror/{gone['id']}")).status_code != 404:  # noqa: ASYNC110 - it is asked
                await asyncio.sleep(0.05)
    hub.log.clear()
    for kept, options in ((newest, {}), (narrow, {"allow_patterns": ["*.json"]}), (other, {})):
        manifest = kept["sources"][0]["manifest"]
        assert (await mirror.http.get(f"/manifests/{manifest}")).status_code == 200
        pinned = source(f"hf://org/model@{kept['sources'][0]['resolved_revision']}", "/again", **options)
        assert (await mirror.ready(pinned))["sources"][0]["manifest"] == manifest
    assert hub.log.count("tree") == 0


# --- an embedded database, looked at past SQLAlchemy ---


async def in_both_ways(mirror: MirrorUnderTest, file: Path, *, is_newest: bool, **asked: Any) -> MirrorSource | None:
    """What is held, which the mirror and the look at its file agree about."""
    wanted = WeightsSourceBody.model_validate(source(**asked)).to_core()
    held = await mirror.service.requests.held(wanted, "default", is_newest=is_newest)
    found = held_in(file, wanted, "default", is_newest=is_newest)
    assert found == (held and (held.source, held.mirrored_at))
    return found[0] if found else None


async def test_a_look_at_the_file_finds_what_the_mirror_finds(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    repository = hub.repo("org/model")
    old = repository.commit({"config.json": b"{}", "README.md": b"old"})
    file = tmp_path / "mirror.sqlite"
    async with mirror_under_test(tmp_path) as mirror:
        await mirror.ready(MODEL)
        await mirror.ready(source("hf://org/model", allow_patterns=["*.json"]))
        new = repository.commit({"README.md": b"new"})
        await mirror.ready(MODEL)
        commits = {old: {"uri": f"hf://org/model@{old}"}, new: {"uri": f"hf://org/model@{new}"}}
        for revision, asked in commits.items():
            for is_newest in (False, True):
                found = await in_both_ways(mirror, file, is_newest=is_newest, **asked)
                assert found is not None
                assert found.resolved_revision == revision
        for narrow in ({"allow_patterns": ["*.json"]}, {"ignore_patterns": ["*.json"]}):
            for revision, asked in commits.items():
                found = await in_both_ways(mirror, file, is_newest=False, **asked, **narrow)
                assert (found is not None) == ("allow_patterns" in narrow and revision == old)
        newest = await in_both_ways(mirror, file, is_newest=True, uri="hf://org/model")
        assert newest is not None
        assert newest.resolved_revision == new
        for unknown, is_newest in (("hf://org/model", False), ("hf://org/model@v1", True), ("hf://org/other", True)):
            assert await in_both_ways(mirror, file, is_newest=is_newest, uri=unknown) is None
        for name, patterns, is_update in (
            ("hf://org/model", [], True),
            (f"hf://org/model@{old}", [], True),
            ("hf://org/model", ["*.json"], False),
            ("hf://org/other", [], False),
        ):
            wanted = WeightsSourceBody.model_validate(source(name, allow_patterns=patterns)).to_core()
            known = str(newest.manifest).removeprefix("b3:")
            assert await mirror.service.requests.is_update(known, wanted, "default") == is_update
            assert is_update_in(file, known, wanted, "default") == is_update
        await mirror.evict(manifest=newest.manifest, tier="mirror")
        found = await in_both_ways(mirror, file, is_newest=True, uri="hf://org/model")
        assert found is not None
        assert found.resolved_revision == old
        assert await in_both_ways(mirror, file, is_newest=False, **commits[new]) is None


def changed(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


LOST: dict[str, Callable[[Path], object]] = {
    "absent": Path.unlink,
    "of-another-version": lambda file: changed(file, "UPDATE alembic_version SET version_num = '9999'"),
    "without-a-version": lambda file: changed(file, "DROP TABLE alembic_version"),
    "no-database": lambda file: file.write_bytes(b"nothing" * 1000),
    "empty": lambda file: file.write_bytes(b""),
    "with-something-damaged": lambda file: changed(file, "UPDATE chunks SET damage = 'flipped'"),
    "with-a-row-that-is-none": lambda file: changed(file, "UPDATE mirror_sources SET request = '{', warnings = '{'"),
}  # fmt: skip


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
async def test_a_file_that_cannot_be_relied_on_tells_nothing(
    upstreams: None, hub: Hub, tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    async with mirror_under_test(tmp_path) as mirror:
        await mirror.ready(MODEL)
    file, wanted = tmp_path / "mirror.sqlite", WeightsSourceBody.model_validate(MODEL).to_core()
    assert held_in(file, wanted, "default", is_newest=True)
    assert held_in(file, wanted, "other", is_newest=True) is None

    lose(file)

    assert held_in(file, wanted, "default", is_newest=True) is None
    note_use_in(file, "0" * 64, 1.0)
    assert file.exists() == (lose is not LOST["absent"])


async def test_a_use_is_noted_in_the_file_at_most_once_a_minute_and_not_while_another_writes(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    async with mirror_under_test(tmp_path) as mirror:
        manifest = (await mirror.manifest(MODEL)).removeprefix("b3:")
    # The mirror has ended: nothing is noted while it writes, and when it does so is its own affair.
    file, later = tmp_path / "mirror.sqlite", time.time() + 1000

    def used(seconds: float, name: str = manifest) -> Any:
        note_use_in(file, name, later + seconds)
        return [(row[0], row[-1]) for row in mirror.rows("manifests")["manifests"]]

    assert used(0) == [(manifest, later)]
    assert used(59) == [(manifest, later)]
    assert used(61) == [(manifest, later + 61)]
    assert used(61, "0" * 64) == [(manifest, later + 61)]
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert used(1000) == [(manifest, later + 61)]
        other.execute("ROLLBACK")
    assert used(1000) == [(manifest, later + 1000)]
