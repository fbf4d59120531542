"""What an earlier version left is taken over whole; what a later version left is refused before anything is touched."""

import json
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, Table, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from bdn.core.errors import InvalidRequestError
from bdn.mirror.db import agents
from bdn.mirror.db.database import MIGRATIONS, Database
from bdn.mirror.db.recall import HEAD
from bdn.mirror.db.tables import CheckpointRow, ContentChunkRow, MirrorRow, ProjectRow
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.names import named
from tests.support.content.trees import tree
from tests.support.mirror import earlier
from tests.support.mirror.fake_agent import FakeAgent
from tests.support.mirror.service import mirror_under_test, source
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [
    pytest.mark.promise("upgrades"),
    pytest.mark.usefixtures("backend"),
    pytest.mark.embedded("it has a database of either kind, and a directory of an earlier version"),
]
VERSIONS = ("0005", "0010")  # of the first landed version, and of a later one
FILES = {"config.json": b"{}", "model.bin": b"weights" * 1000}


def upgrade(connection: Connection, revision: str) -> None:
    """The real migrations, up to this one."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    (tmp_path / "mirror").mkdir()
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/mirror/mirror.sqlite"
    return str(request.getfixturevalue("empty_postgres_url"))


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_an_earlier_version_left_is_kept_whole(
    version: str, url: str, upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    dump = json.loads((earlier.DUMPS / f"{version}.json").read_text())
    for name, files in (("model", earlier.MODEL), ("later", earlier.LATER)):
        hub.repo(f"org/{name}").commit(files)
    earlier.fill_store(tmp_path / "mirror/store", dump)

    def fill(connection: Connection) -> None:
        upgrade(connection, version)
        earlier.fill(connection, dump)

    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(fill)
    assert await database.version() == version
    await database.migrate()
    assert await database.version() == HEAD
    await database.close()
    left = {row["source"]: row for row in dump["rows"]["mirror_sources"]}
    async with mirror_under_test(tmp_path / "mirror", database_url=url, secrets_key=earlier.KEY) as mirror:
        documents = {name: await mirror.ended(row["mirror_id"]) for name, row in left.items()}
        assert documents["hf://org/none"]["error"] == left["hf://org/none"]["error"]
        model, later = documents["hf://org/model@main"], documents["hf://org/later"]
        assert (model["status"], later["status"]) == ("READY", "READY")  # the other one was being mirrored
        assert await mirror.tree(later["sources"][0]["manifest"]) == earlier.LATER
        manifest = model["sources"][0]["manifest"]
        assert manifest == f"b3:{left['hf://org/model@main']['manifest']}"
        assert await mirror.tree(manifest) == earlier.MODEL
        assert (await mirror.ready(source("hf://org/model@main")))["bytes_transferred"] == 0

        (secret,) = (await mirror.http.post("/secrets/rotate")).json()["items"]  # reads it, and encrypts it again
        assert secret["name"] == "team"
        (agent,) = (await mirror.get("/agents"))["items"]
        assert (agent["node"], agent["manifests"]) == ("n1", 1)
        held = {item["manifest"]: item for item in (await mirror.get("/manifests"))["items"]}
        assert held[manifest]["nodes"]["c/n1"]["held_by"] == ["job-7"]
        (eviction,), (prefetch,) = (
            [row for row in dump["rows"].get(kind, dump["rows"].get("operations")) if row["id"].startswith(kind[:2])]
            for kind in ("evictions", "prefetches")
        )
        assert (await mirror.get(f"/evictions/{eviction['id']}"))["status"] == "DONE"
        assert [command["id"] for command in (await FakeAgent(mirror, "n1").beat())["pending"]] == [prefetch["id"]]

        if "tombstones" in dump["rows"]:  # before there were any, what was evicted was gone
            answer = await mirror.http.post("/restorations", json={"source": "hf://org/evicted"})
            assert answer.is_success, answer.text
            (restored,) = answer.json()["items"]
            assert await mirror.tree(restored["manifest"]) == earlier.EVICTED
        await mirror.collect(grace_seconds=0)
        assert await mirror.tree(manifest) == earlier.MODEL
    assert (tmp_path / "mirror/mirror.sqlite").exists() == url.startswith("sqlite")
    tally.add(scenarios=1)


async def test_the_chunks_of_contents_that_were_mirrored_before_are_found_by_name(url: str, tally: Tally) -> None:
    names = [named(f"chunk {number}") for number in range(2500)]
    files = {"large": names, "again": [names[7]] * 3, "small": names[:1], "packed": []}

    def fill(connection: Connection) -> None:
        upgrade(connection, "0014")
        rows = [
            {"digest": named(file).hex, "size": 1, "chunks": b"".join(name.to_bytes() for name in chunks)}
            for file, chunks in files.items()
        ]
        connection.execute(Table("contents", MetaData(), autoload_with=connection).insert(), rows)

    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(fill)
    await database.migrate()
    async with database.read() as session:
        found = (await session.execute(select(ContentChunkRow.content, ContentChunkRow.chunk))).all()
    await database.close()
    large, again = named("large").hex, named("again").hex
    assert sorted(map(tuple, found)) == sorted([*((large, name.hex) for name in names), (again, names[7].hex)])
    tally.add(scenarios=1)


async def test_projects_from_before_there_were_teams_are_the_team_defaults(url: str, tally: Tally) -> None:
    """So are those that the version before writes beside this one; and what is one team's name may be another's."""
    project: dict[str, object] = {"id": "0123456789", "organisation": "acme", "name": "llama", "created_at": 1e9}
    checkpoint: dict[str, object] = {
        "id": "chk_1",
        "organisation": "acme",
        "project": "0123456789",
        "job": "job1",
        "name": "c",
        "rank": 0,
    }
    checkpoint |= {"mirror": "mir_1", "manifest": "1" * 64, "created_at": 1e9, "committed_at": 1e9}
    checkpoint |= {"files_total": 1, "bytes_total": 2, "details": {"checkpoint_type": "full"}}
    mirror: dict[str, object] = {"organisation": "acme", "request_key": "1" * 64, "status": "READY", "created_at": 1e9}

    def write(connection: Connection, table: str, row: dict[str, object]) -> None:
        connection.execute(Table(table, MetaData(), autoload_with=connection).insert(), row)

    def fill(connection: Connection) -> None:
        upgrade(connection, "0015.1")
        write(connection, "projects", project)
        write(connection, "checkpoints", checkpoint)
        write(connection, "mirrors", mirror | {"id": "mir_1"})

    def go_on(connection: Connection) -> None:
        write(connection, "projects", project | {"id": "abcdefghij", "name": "of the version before"})
        write(connection, "mirrors", mirror | {"id": "mir_2"})
        write(connection, "projects", project | {"id": "zyxwvutsrq", "team": "research"})

    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(fill)
    await database.migrate()
    async with database._engine.begin() as connection:
        await connection.run_sync(go_on)
    with pytest.raises(IntegrityError):
        async with database._engine.begin() as connection:
            await connection.run_sync(write, "projects", project | {"id": "a" * 10})
    async with database.read() as session:
        kept = (await session.execute(select(CheckpointRow))).scalar_one()
        found = (await session.execute(select(ProjectRow.id, ProjectRow.team).order_by(ProjectRow.id))).all()
        of_mirrors = set((await session.execute(select(MirrorRow.team))).scalars())
    await database.close()
    assert {name: getattr(kept, name) for name in checkpoint} == checkpoint
    assert found == [("0123456789", "Default"), ("abcdefghij", "Default"), ("zyxwvutsrq", "research")]
    assert of_mirrors == {"Default"}
    tally.add(scenarios=1)


async def test_what_was_asked_before_operations_had_one_table_is_still_told(url: str, tmp_path: Path) -> None:
    error = {"code": "CACHE_FULL", "message": "full", "retryable": True, "details": {}}
    evicted = {"tier": "node", "cluster": "c", "node": "n1", "manifest": f"b3:{'1' * 64}", "bytes": 5}
    damaged = {"tier": "mirror", "chunk": f"b3:{'2' * 64}", "outcome": "lost", "reason": "other bytes"}
    asked = {"organisation": "default", "created_at": 1e9, "completed_at": 1e9 + 1, "error": None}
    before: dict[str, list[dict[str, object]]] = {
        "evictions": [
            {"id": f"evi_{'0' * 24}", "status": "FAILED", "request": {"all": True}, "command": {}, "pending": []}
            | {"items": [evicted, evicted | {"tier": "mirror", "node": None}], "unreachable": ["c/n2"], **asked},
            {"id": f"evi_{'1' * 24}", "status": "FAILED", "request": {"all": True}, "command": {}, "pending": []}
            | {"items": [], "unreachable": [], **asked, "error": error},
            {"id": f"evi_{'2' * 24}", "status": "RUNNING", "request": {"all": True}, "pending": ["mirror"]}
            | {"command": {"id": f"evi_{'2' * 24}", "all": True}, "items": [], "unreachable": [], **asked}
            | {"created_at": time.time(), "completed_at": None},
        ],
        "verifications": [
            {"id": f"ver_{'0' * 24}", "status": "DAMAGED", "request": {"all": True}, "command": {}, "pending": []}
            | {"items": [damaged], "unreachable": [], "chunks_read": 7, "bytes_read": 70, "cursor": None, **asked}
        ],
        "prefetches": [
            {"id": f"pre_{'0' * 24}", "organisation": "default", "status": "RUNNING", "created_at": 1e9}
            | {"request": {"source": "hf://org/model"}, "mounts": [{"manifest": "3" * 64, "source": "hf://org/model"}]}
        ],
        "prefetch_nodes": [
            {"prefetch": f"pre_{'0' * 24}", "cluster": "c", "node": node, "state": state, "bytes_total": 5}
            | {"bytes_from": {"mirror": 5}, "error": error if state == "FAILED" else None}
            for node, state in (("n1", "READY"), ("n2", "FAILED"), ("n3", "UNREACHABLE"))
        ],
        "collections": [
            {"id": f"col_{'0' * 24}", "status": "DONE", "created_at": 1e9, "completed_at": 1e9, "error": None}
            | {"request": {"dry_run": False}, "kinds": [{"kind": "chunks", "count": 2, "bytes": 9}]}
        ],
    }

    def fill(connection: Connection) -> None:
        upgrade(connection, "0009")
        for table, found in before.items():
            connection.execute(Table(table, MetaData(), autoload_with=connection).insert(), found)

    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(fill)
    await database.migrate()
    await database.close()
    async with mirror_under_test(tmp_path / "mirror", database_url=url, work=False) as mirror:
        one, two, three = [await mirror.get(f"/evictions/evi_{n * 24}") for n in "012"]
        verified = await mirror.get(f"/verifications/ver_{'0' * 24}")
        prefetched = await mirror.get(f"/prefetches/pre_{'0' * 24}")
        collected = await mirror.get(f"/collections/col_{'0' * 24}")
    assert (one["status"], one["unreachable"], one["bytes_freed"]) == ("FAILED", ["c/n2"], 10)
    assert sorted((item["tier"], item["node"]) for item in one["items"]) == [("mirror", None), ("node", "n1")]
    assert (two["status"], two["error"], two["completed_at"] is None) == ("FAILED", error, False)
    assert (three["status"], three["error"]) == ("RUNNING", None)  # the mirror has its part to do
    assert (verified["status"], verified["items"][0]["outcome"]) == ("DAMAGED", "lost")
    assert (verified["chunks_read"], verified["bytes_read"]) == (7, 70)
    assert [(node["node"], node["state"]) for node in prefetched["nodes"]] == [
        ("n1", "READY"),
        ("n2", "FAILED"),
        ("n3", "UNREACHABLE"),
    ]
    assert prefetched["nodes"][0]["bytes_from"]["mirror"] == 5
    assert (prefetched["status"], prefetched["nodes"][1]["error"]) == ("FAILED", error)
    assert (collected["status"], collected["bytes_freed"], collected["kinds"][0]["count"]) == ("DONE", 9, 2)


async def test_what_agents_held_before_holdings_had_a_table_is_still_known(url: str, tmp_path: Path) -> None:
    manifest = f"b3:{'1' * 64}"
    agent = {"cluster": "c", "boot_id": "b", "roles": ["node"], "version": "1", "tiers": {}, "joined_at": 1e9}
    agent |= {"last_heartbeat": time.time(), "advertise": "http://n1:1"}
    held = {"manifest": manifest, "bytes": 5, "complete": True, "last_used": None, "sources": []}
    rows = [
        agent | {"node": "n1", "holdings": [held | {"held_by": ["job-7"], "cluster_bytes": 0}, {"manifest": "?"}]},
        agent | {"node": "n2", "holdings": []},
    ]

    def fill(connection: Connection) -> None:
        upgrade(connection, "0011")
        connection.execute(Table("agents", MetaData(), autoload_with=connection).insert(), rows)

    database = Database(url)
    async with database._engine.begin() as connection:
        await connection.run_sync(fill)
    await database.migrate()
    async with database.read() as session:
        assert await agents.holders(session, ["1" * 64]) == {"1" * 64: ["job-7 on n1"]}
        (holding,) = (await agents.holdings_of(session, ["1" * 64]))["1" * 64].values()
    assert (holding.manifest, holding.bytes, holding.held_by) == (manifest, 5, ["job-7"])
    async with mirror_under_test(tmp_path / "mirror", database_url=url, work=False) as mirror:
        told = [(one["node"], one["manifests"]) for one in (await mirror.get("/agents"))["items"]]
        reply = await FakeAgent(mirror, "n1", holdings=None).beat()
    assert told == [("n1", 1), ("n2", 0)]
    assert reply["holdings_digest"] == ""  # so an agent of this version tells all again
    async with database.read() as session:
        assert await agents.manifests_on(session, "c", "n1") == {"1" * 64}
    await database.close()


def as_the_first_version_left_it(cache: Path) -> None:
    """Whole files stood one folder deeper, and nothing said which format this is."""
    (cache / "format").unlink()
    for path in list(cache.glob("files/*/*")):
        deeper = path.parent / path.name[2:4]
        deeper.mkdir(exist_ok=True)
        path.rename(deeper / path.name)
    for folder in cache.glob("files/*"):
        if not any(folder.iterdir()):
            folder.rmdir()


async def test_a_cache_of_the_first_version_keeps_its_files_and_its_stages(tmp_path: Path) -> None:
    with AgentMirror(is_packed=True).running() as mirror:
        manifest, rig = mirror.publish(FILES), Rig(mirror, tmp_path)
        async with rig.agent() as agent:
            stage = await staged(agent, mirror, manifest)
        as_the_first_version_left_it(rig.cache)
        mirror.forget()
        async with rig.agent() as agent:
            again = await staged(agent, mirror, manifest)
            assert again.id == stage.id
            assert tree(Path(again.mounts[0].path)) == FILES
            assert agent.cache.index.ledger.committed_bytes == manifest.bytes_total
            assert not mirror.requests
        assert (rig.cache / "format").read_bytes() == b"1\n"
        assert sorted(path.parent.parent.name for path in rig.cache.glob("files/*/*")) == ["files"] * len(FILES)


@pytest.mark.parametrize("content", [b"2\n", b"", b"\xff\x00"])
async def test_a_cache_of_an_unknown_format_is_refused(content: bytes, tmp_path: Path) -> None:
    with AgentMirror().running() as mirror:
        manifest, rig = mirror.publish(FILES), Rig(mirror, tmp_path)
        async with rig.agent() as agent:
            await staged(agent, mirror, manifest)
        (rig.cache / "format").write_bytes(content)
        (rig.cache / "files/of-a-later-version").write_bytes(b"which we would take for rubbish")
        before = everything(rig.cache)
        with pytest.raises(InvalidRequestError, match="nothing was touched"):
            async with rig.agent():
                pass
        assert everything(rig.cache) == before


def everything(root: Path) -> str:
    """Names, sizes, times, links and owners of all that is below."""
    found = [(str(path), *path.lstat()[:7], path.lstat().st_mtime_ns) for path in sorted(root.rglob("*"))]
    return json.dumps(found)
