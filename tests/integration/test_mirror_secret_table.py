"""The encrypted secrets of the mirror: set, used, rotated and removed, on SQLite and on PostgreSQL."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.mirror.db import credentials
from bdn.mirror.db.database import Database
from bdn.mirror.upstream.secrets import Keyring, SecretTable, new_key
from tests.doubles.hub import Hub
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)

KEY, NEWER = new_key(), new_key()
VALUE = "hf_sesame_0123456789"
ONE_KIND = pytest.mark.parametrize("database_options", ["sqlite"], indirect=True)  # no statement of their own
OpenMirror = Callable[..., AbstractAsyncContextManager[MirrorUnderTest]]


@pytest.fixture
def mirror_with(database_options: dict[str, Any], upstreams: None, tmp_path: Path) -> OpenMirror:
    """A mirror with the keys that are given, on each kind of database."""

    def opened(key: str | None = KEY) -> AbstractAsyncContextManager[MirrorUnderTest]:
        return mirror_under_test(tmp_path / "mirror", secrets_key=key, **database_options)

    return opened


async def put(mirror: MirrorUnderTest, name: str, value: str = VALUE) -> Json:
    answer = await mirror.http.put(f"/secrets/{name}", json={"value": value})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def listed(mirror: MirrorUnderTest) -> dict[str, Json]:
    answer = await mirror.http.get("/secrets")
    assert answer.status_code == 200, answer.text
    return {item["name"]: item for item in answer.json()["items"]}


async def failed(mirror: MirrorUnderTest, wanted: Json) -> Json:
    document = await mirror.mirror(wanted)
    assert document["status"] == "FAILED", document
    return dict(document["error"])


async def execute(database_url: str, statement: str) -> None:
    database = Database(database_url)
    async with database.write() as session:
        await session.execute(text(statement))
    await database.close()


async def test_a_secret_that_was_set_opens_a_private_source_and_is_never_shown(
    mirror_with: OpenMirror, hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    private = source("hf://org/private", **with_secret("team-token"))
    shown: list[str] = []
    async with mirror_with() as mirror:
        assert (await failed(mirror, private))["code"] == "SECRET_NOT_FOUND"
        shown.append(str(await put(mirror, "team-token", hub.token)))
        assert (await mirror.ready(private))["bytes_total"] == 1
        shown += [str(await listed(mirror)), (await mirror.http.get("/mirror")).text, repr(mirror.service)]
        assert (await mirror.http.delete("/secrets/team-token")).status_code == 204
        assert (await failed(mirror, private))["code"] == "SECRET_NOT_FOUND"
    shown += [caplog.text, *(repr(vars(record)) for record in caplog.records if record.name.startswith("bdn"))]
    files = [path for path in (tmp_path / "mirror").rglob("*") if path.is_file()]
    kept = b"".join([await asyncio.to_thread(path.read_bytes) for path in files])
    for secret in (hub.token, KEY):
        assert secret not in "".join(shown)
        assert secret.encode() not in kept
    assert "secret set" in caplog.text


async def test_the_database_never_holds_a_value_and_its_dates_say_when_it_was_set(
    mirror_with: OpenMirror, database_url: str, tmp_path: Path
) -> None:
    async with mirror_with() as mirror:
        first = await put(mirror, "b")
        await put(mirror, "a", '{"aws_access_key_id": "AKIASESAME"}')
        second = await put(mirror, "b", "another")
        entries = await listed(mirror)
    assert list(entries) == ["a", "b"]
    assert second["created_at"] == first["created_at"] <= first["updated_at"] < second["updated_at"]
    assert set(first) == {"name", "created_at", "updated_at", "sealed_with", "outranked"}
    database = Database(database_url)
    async with database.read() as session:
        rows = (await session.execute(text("SELECT * FROM secrets ORDER BY name"))).all()
    assert await SecretTable(database, Keyring.parse(KEY)).value("default", "b") == "another"
    await database.close()
    assert len(rows) == 2
    raw = repr(rows).encode() + b"".join(
        [await asyncio.to_thread(path.read_bytes) for path in (tmp_path / "mirror").rglob("mirror.sqlite*")]
    )
    for part in (VALUE, "another", "AKIASESAME", "aws_access_key_id", KEY):
        assert part.encode() not in raw


async def test_keys_are_rotated_without_setting_a_secret_again(mirror_with: OpenMirror, database_url: str) -> None:
    async with mirror_with() as mirror:
        await put(mirror, "old")
    async with mirror_with(f"{NEWER},{KEY}") as mirror:
        await put(mirror, "new")
        assert {name: entry["sealed_with"] for name, entry in (await listed(mirror)).items()} == {
            "old": "older key",
            "new": "first key",
        }
        before = await listed(mirror)
        answer = await mirror.http.post("/secrets/rotate")
        assert {item["sealed_with"] for item in answer.json()["items"]} == {"first key"}
        assert (await listed(mirror))["old"]["updated_at"] == before["old"]["updated_at"]  # the value is the same
    async with mirror_with(NEWER) as mirror:
        assert {entry["sealed_with"] for entry in (await listed(mirror)).values()} == {"first key"}
    database = Database(database_url)
    assert await SecretTable(database, Keyring.parse(NEWER)).value("default", "old") == VALUE
    await database.close()


async def test_an_operator_rotates_the_secrets_of_all_and_hears_how_many_are_left(
    mirror_with: OpenMirror, database_url: str
) -> None:
    database = Database(database_url)
    older = SecretTable(database, Keyring.parse(KEY))
    for organisation in ("default", "acme", "rival"):
        await older.set(organisation, "team", f"{VALUE} of {organisation}")
    await SecretTable(database, Keyring.parse(new_key())).set("rival", "lost", VALUE)
    async with mirror_with(f"{NEWER},{KEY}") as mirror:
        one = await mirror.http.post("/secrets/rotate", headers={"BDN-Organisation": "acme"})
        assert (one.status_code, [item["name"] for item in one.json()["items"]]) == (200, ["team"])
        assert one.json()["others_left"] is None
        assert {entry["sealed_with"] for entry in (await listed(mirror)).values()} == {"older key"}
        everybody = await mirror.http.post("/secrets/rotate")
        assert (everybody.status_code, everybody.json()["others_left"]) == (200, 1)
        assert [item["sealed_with"] for item in everybody.json()["items"]] == ["first key"]
    newer = SecretTable(database, Keyring.parse(NEWER))
    for organisation in ("default", "acme", "rival"):
        assert await newer.value(organisation, "team") == f"{VALUE} of {organisation}"
    with pytest.raises(SecretMalformedError, match="not among those"):
        await newer.value("rival", "lost")
    await database.close()


@ONE_KIND
async def test_without_the_right_key_everything_says_so_and_changes_nothing(
    mirror_with: OpenMirror, hub: Hub, database_url: str
) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    private = source("hf://org/private", **with_secret("team-token"))
    async with mirror_with() as mirror:
        await put(mirror, "team-token", hub.token)
    async with mirror_with(NEWER) as mirror:
        error = await failed(mirror, private)
        assert (error["code"], error["retryable"]) == ("SECRET_MALFORMED", False)
        assert "not among those of the mirror's BDN_SECRETS_KEY" in error["message"]
        refused = await mirror.http.post("/secrets/rotate")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "SECRET_MALFORMED")
        assert (await listed(mirror))["team-token"]["sealed_with"] == "unknown key"
    async with mirror_with(None) as mirror:
        assert "would have to be in the mirror's BDN_SECRETS_KEY" in (await failed(mirror, private))["message"]
        refused = await mirror.http.put("/secrets/other", json={"value": VALUE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "INVALID_REQUEST")
        assert "bdn-admin secrets new-key" in refused.text
        assert set(await listed(mirror)) == {"team-token"}
    async with mirror_with() as mirror:
        assert (await mirror.ready(private))["bytes_total"] == 1


@ONE_KIND
async def test_a_mirror_does_not_start_with_something_that_is_no_key(mirror_with: OpenMirror) -> None:
    with pytest.raises(InvalidRequestError, match="BDN_SECRETS_KEY: key 1 is not 32 bytes"):
        async with mirror_with("sesame"):
            pytest.fail("it started")


async def test_a_row_that_was_moved_to_another_name_or_organisation_is_refused(
    mirror_with: OpenMirror, database_url: str
) -> None:
    async with mirror_with() as mirror:
        await put(mirror, "one")
        await put(mirror, "two", "other")
    columns = "ciphertext, created_at, updated_at FROM secrets WHERE name = 'one'"
    await execute(database_url, f"INSERT INTO secrets SELECT 'default', 'copy', {columns}")
    await execute(database_url, f"INSERT INTO secrets SELECT 'rival', 'one', {columns}")
    database = Database(database_url)
    table = SecretTable(database, Keyring.parse(KEY))
    for organisation, name in (("default", "copy"), ("rival", "one")):
        with pytest.raises(SecretMalformedError, match="made for another name or organisation"):
            await table.value(organisation, name)
    assert await table.value("default", "one") == VALUE
    await database.close()


@ONE_KIND
async def test_a_name_or_a_value_that_cannot_be_is_refused_without_repeating_the_value(mirror_with: OpenMirror) -> None:
    async with mirror_with() as mirror:
        refusals = [
            await mirror.http.put(f"/secrets/{name}", json=body)
            for name, body in (
                ("a%20b", {"value": VALUE}),
                ("x" * 129, {"value": VALUE}),
                ("ok", {"value": VALUE, "more": 1}),
                ("ok", {"value": [VALUE]}),
                ("ok", {"value": f"{{{VALUE}"}),
                ("ok", {"value": ""}),
            )
        ]
        too_long = await mirror.http.put("/secrets/ok", json={"value": VALUE * 4000})
        assert await listed(mirror) == {}
        assert (await mirror.http.delete("/secrets/ok")).status_code == 404
        assert (await mirror.http.get("/secrets/ok")).status_code == 405  # there is no way to read one
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refusals} == {(422, "INVALID_REQUEST")}
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "LIMIT_EXCEEDED")
    assert VALUE not in "".join(answer.text for answer in (*refusals, too_long))


@ONE_KIND
async def test_a_secret_behind_one_of_the_operator_s_is_said_to_be_outranked(
    mirror_with: OpenMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_SECRET_TEAM_TOKEN", "from the environment")
    async with mirror_with() as mirror:
        assert (await put(mirror, "team-token"))["outranked"] is True
        assert (await put(mirror, "other"))["outranked"] is False
        assert [entry["outranked"] for entry in (await listed(mirror)).values()] == [False, True]


async def test_removing_a_secret_leaves_all_others(mirror_with: OpenMirror, database_url: str) -> None:
    database = Database(database_url)
    table = SecretTable(database, Keyring.parse(KEY))
    for organisation, name in (("default", "one"), ("default", "two"), ("rival", "one")):
        await table.set(organisation, name, VALUE)
    async with mirror_with() as mirror:
        assert (await mirror.http.delete("/secrets/one")).status_code == 204
        assert list(await listed(mirror)) == ["two"]
    assert await table.value("rival", "one") == VALUE
    assert await table.value("default", "one") is None
    await database.close()


async def test_of_many_values_set_at_once_one_stays(mirror_with: OpenMirror, database_url: str) -> None:
    values = [f"value-{number}" for number in range(8)]
    async with mirror_with() as mirror:
        async with asyncio.TaskGroup() as group:
            for value in values:
                group.create_task(put(mirror, "same", value))
        assert list(await listed(mirror)) == ["same"]
    database = Database(database_url)
    assert await SecretTable(database, Keyring.parse(KEY)).value("default", "same") in values
    await database.close()


async def test_a_value_that_is_set_while_keys_are_rotated_stays(database_url: str) -> None:
    database = Database(database_url)
    table = SecretTable(database, Keyring.parse(KEY))
    await table.set("default", "same", "old value")
    async with database.read() as session:
        (seen,) = await credentials.secrets_of(session, "default")
    await table.set("default", "same", "new value")
    async with database.write() as session:
        await credentials.reseal(session, seen, table.keyring.seal("default", "same", "old value"))
    assert await table.value("default", "same") == "new value"
    await database.close()
