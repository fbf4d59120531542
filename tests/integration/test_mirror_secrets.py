"""Secrets of the mirror: of the operator, encrypted in its database, and never told to anybody."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote_plus, urlsplit

import pytest

from bdn.mirror.db.database import Database
from bdn.mirror.db.secrets import Keyring, SecretTable, new_key
from tests.doubles.azure import ACCOUNT, AzureServer
from tests.doubles.azure import KEY as AZURE_KEY
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, drop, rate_limited, truncate
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket
from tests.support.content.cloud_identity import Clouds, aws_assume_role, aws_oidc, gcp_oidc, trusted_mirror
from tests.support.mirror.secret_search import KEY_FILES, Seen, logging_like_a_program, text_of
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")


async def test_a_mirror_of_private_sources_needs_the_secret_each_time(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    private = source("hf://org/private", **with_secret("team-token"))
    async with mirror_under_test(tmp_path / "m", secrets_dir=tmp_path) as mirror:
        (tmp_path / "team-token").write_text(f"{hub.token}\n")
        await mirror.ready(private)
        (tmp_path / "team-token").write_text(hub.stranger_token)  # revoked: what is held opens nothing
        assert (await mirror.failed(private))["code"] == "SOURCE_NOT_FOUND"
        (tmp_path / "team-token").unlink()
        assert (await mirror.failed(private))["code"] == "SECRET_NOT_FOUND"
        assert (await mirror.failed(source("hf://org/private")))["code"] == "AUTH_REQUIRED"
        monkeypatch.setenv("BDN_SECRET_TEAM_TOKEN", hub.token)
        assert (await mirror.ready(private))["bytes_transferred"] == 0


# --- The encrypted secrets of the mirror: set, used, rotated and removed, on SQLite and on PostgreSQL ---


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


@pytest.fixture
async def table(database_url: str) -> AsyncIterator[SecretTable]:
    """The table of that database, with the key that ``mirror_with`` takes by itself."""
    database = Database(database_url)
    yield SecretTable(database, Keyring.parse(KEY))
    await database.close()


async def put(mirror: MirrorUnderTest, name: str, value: str = VALUE) -> Json:
    answer = await mirror.http.put(f"/secrets/{name}", json={"value": value})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def listed(mirror: MirrorUnderTest) -> dict[str, Json]:
    answer = await mirror.http.get("/secrets")
    assert answer.status_code == 200, answer.text
    return {item["name"]: item for item in answer.json()["items"]}


async def test_secrets_are_listed_and_replaced_and_removed_one_by_one(
    mirror_with: OpenMirror, table: SecretTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_SECRET_B", "of the operator")
    await table.set("rival", "a", VALUE)
    async with mirror_with() as mirror:
        first = await put(mirror, "b")
        await put(mirror, "a")
        second = await put(mirror, "b", "another")
        assert {name: entry["outranked"] for name, entry in (await listed(mirror)).items()} == {"a": False, "b": True}
        assert (await mirror.http.delete("/secrets/a")).status_code == 204
        assert list(await listed(mirror)) == ["b"]
    assert second["created_at"] == first["created_at"] <= first["updated_at"] < second["updated_at"]
    assert set(first) == {"name", "created_at", "updated_at", "sealed_with", "outranked"}
    values = [await table.value(*place) for place in (("default", "a"), ("default", "b"), ("rival", "a"))]
    assert values == [None, "another", VALUE]


async def test_keys_are_rotated_without_setting_a_secret_again(mirror_with: OpenMirror, table: SecretTable) -> None:
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
    assert await SecretTable(table.database, Keyring.parse(NEWER)).value("default", "old") == VALUE


@ONE_KIND
async def test_without_the_right_key_nothing_changes(mirror_with: OpenMirror, hub: Hub) -> None:
    hub.repo("org/private", private=True).commit({"a.txt": b"1"})
    private = source("hf://org/private", **with_secret("team-token"))
    async with mirror_with() as mirror:
        await put(mirror, "team-token", hub.token)
    async with mirror_with(NEWER) as mirror:
        error = await mirror.failed(private)
        assert (error["code"], error["retryable"]) == ("SECRET_MALFORMED", False)
        assert "not one of the keys in the mirror's BDN_SECRETS_KEY" in error["message"]
        refused = await mirror.http.post("/secrets/rotate")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "SECRET_MALFORMED")
        assert (await listed(mirror))["team-token"]["sealed_with"] == "unknown key"
    async with mirror_with() as mirror:
        assert (await mirror.ready(private))["bytes_total"] == 1


@ONE_KIND
async def test_a_name_or_a_value_that_cannot_be_is_refused_without_repeating_the_value(mirror_with: OpenMirror) -> None:
    async with mirror_with() as mirror:
        refusals = [
            await mirror.http.put(f"/secrets/{name}", json=body)
            for name, body in (
                ("a%20b", {"value": VALUE}),
                ("x" * 129, {"value": VALUE}),
                ("ok", {"value": [VALUE]}),
                ("ok", {"value": ""}),
            )
        ]
        too_long = await mirror.http.put("/secrets/ok", json={"value": VALUE * 4000})
        assert await listed(mirror) == {}
        assert (await mirror.http.delete("/secrets/ok")).status_code == 404
        reading = await mirror.http.get("/secrets/ok")
        assert (reading.status_code, reading.headers["allow"]) == (405, "DELETE, PUT")  # there is no way to read one
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refusals} == {(422, "INVALID_REQUEST")}
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "LIMIT_EXCEEDED")
    assert VALUE not in "".join(answer.text for answer in (*refusals, too_long))


async def test_of_many_values_set_at_once_one_stays(mirror_with: OpenMirror, table: SecretTable) -> None:
    values = [f"value-{number}" for number in range(8)]
    async with mirror_with() as mirror:
        async with asyncio.TaskGroup() as group:
            for value in values:
                group.create_task(put(mirror, "same", value))
        assert list(await listed(mirror)) == ["same"]
    assert await table.value("default", "same") in values


async def test_a_value_that_is_set_while_keys_are_rotated_stays(table: SecretTable) -> None:
    await table.set("default", "same", "old value")
    (seen,) = await table.rows("default")
    await table.set("default", "same", "new value")
    async with table.database.write() as session:
        await SecretTable(table.database, Keyring.parse(f"{NEWER},{KEY}")).reseal(session, seen)
    assert await table.value("default", "same") == "new value"


# --- No secret, token or signed address is in any log line, error, event, database row, manifest or file, however one signs in ---
OPERATOR = "operator-bearer-7"
TABLE_KEY = base64.b64encode(b"the table's own key of 32 bytes.").decode()
WRONG = {
    "bad-token": "hf_wrongwrong6",
    "bad-text": "hf_unprintable5 with spaces",
    "bad-json": '{"aws_secret_access_key": "unclosed-8"',
    "bad-keys": '{"aws_access_key_id": "AKIAWRONG", "aws_secret_access_key": "wrong-key-9"}',
    "bad-account": '{"client_email": "who@double.iam.gserviceaccount.com", "private_key": "nokey-11", "private_key_id": "x"}',
}
NEEDLES = ["hf_wrongwrong6", "hf_unprintable5", "unclosed-8", "AKIAWRONG", "wrong-key-9", "nokey-11"]
ECHO = b"<html>you sent me sesame-echo-4"


async def watched(mirror: MirrorUnderTest, *wanted: Json) -> Json:
    """The mirror in its terminal state, with its events and its manifests read as well."""
    begun = await mirror.begin(*wanted)
    await mirror.http.get(f"/mirror/{begun['id']}/events")
    document = await mirror.ended(begun["id"])
    for part in document["sources"]:
        if part["manifest"]:
            await mirror.tree(part["manifest"], OPERATOR)
    return document


@pytest.fixture
def azure(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    with AzureServer() as server:
        server.clock = clouds.clock
        monkeypatch.setenv("BDN_AZURE_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def places(
    clouds: Clouds, hub: Hub, bucket: S3Bucket, azure: AzureServer, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Json]:
    """What every method reads, by the method's name; all secrets but two are in the encrypted table."""
    monkeypatch.setenv("BDN_R2_ENDPOINT_URL", clouds.s3.url)
    for name, value in WRONG.items():
        monkeypatch.setenv(f"BDN_SECRET_{name.upper().replace('-', '_')}", value)
    monkeypatch.setenv("BDN_GOOGLE_TOKEN_URL", clouds.gcs.token_url)
    content = GeneratedContent(3 * 2**19)  # too big for a slab
    hub.repo("org/private", private=True).commit({"model.safetensors": content, "small.json": b"{}"})
    bucket.put({"w/a.bin": b"weights", "w/big.bin": content.read(0, content.size)})
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights", "w/big.bin": content.read(0, content.size)})
    azure.container("weights").put({"w/a.bin": b"weights", "w/big.bin": content.read(0, content.size)})
    uri = f"s3://{bucket.name}/w"
    return {
        "hf": source("hf://org/private", "/hf", **with_secret("hub-token")),
        "s3": source(uri, "/s3", **with_secret("table-keys")),
        "r2": source(f"r2://account.{bucket.name}/w", "/r2", **with_secret("table-keys")),
        "gs": source("gs://weights/w", "/gs", **with_secret("table-account")),
        "azure": source(f"azure://{ACCOUNT}/weights/w", "/azure", **with_secret("table-azure")),
        "AWS_OIDC": aws_oidc(uri),
        "AWS_ASSUME_ROLE": aws_assume_role(uri),
        "GCP_OIDC": gcp_oidc("gs://weights/w", clouds.gcs.account.email),
    }


async def test_no_secret_token_or_signed_address_is_shown_or_kept(
    clouds: Clouds, hub: Hub, azure: AzureServer, places: dict[str, Json], tmp_path: Path
) -> None:
    seen = Seen()
    account = clouds.gcs.account.key(clouds.gcs.token_url)
    keys = {
        "aws_access_key_id": clouds.s3.account.access_key_id,
        "aws_secret_access_key": clouds.s3.account.secret_access_key,
    }
    table = {"table-keys": json.dumps(keys), "table-account": json.dumps(account)}
    table["table-azure"] = json.dumps({"account_key": AZURE_KEY})
    with logging_like_a_program(seen):
        options = {"auth": "token", "token": OPERATOR, "bearer": OPERATOR, "secrets_key": TABLE_KEY}
        async with trusted_mirror(clouds, tmp_path, identity_key_file=None, **options) as mirror:
            mirror.http.event_hooks["response"] = [seen.note]
            for name, value in table.items():
                assert (await mirror.http.put(f"/secrets/{name}", json={"value": value})).status_code == 200
            for name, value in WRONG.items():  # refused or kept, and the operator's own of this name is read
                await mirror.http.put(f"/secrets/{name}", json={"value": value})
            await _failures(mirror, clouds, hub, azure, places)
            for name, wanted in places.items():
                assert (await watched(mirror, wanted))["status"] == "READY", name
                await mirror.plan(wanted)
            paths = "mirror?limit=1000 secrets metrics openapi.json agents clusters nowhere healthz readyz"
            for path in (*paths.split(), ".well-known/openid-configuration", ".well-known/jwks.json"):
                await mirror.http.get(f"/{path}")
            seen.rows = repr(mirror.rows())
            seen.files = await asyncio.to_thread(text_of, tmp_path)
    exchanged = [
        *(body.get("WebIdentityToken", "") for body in clouds.sts.bodies),
        *clouds.google.subject_tokens,
        *clouds.google.federated,
        *clouds.google.issued,
    ]
    sessions = [session.account for session in clouds.sts.sessions]
    session_keys = [
        part for keys in sessions for part in (keys.access_key_id, keys.secret_access_key, keys.session_token)
    ]
    signed = [dict(parse_qsl(urlsplit(request.target).query))["sig"] for request in azure.log.find("sig=")]
    assert signed
    own = clouds.sts.principals["AKIAOPERATOR"]
    secrets = [hub.token, *keys.values(), *account["private_key"].splitlines()[1:3], OPERATOR, TABLE_KEY, "sesame-echo"]
    secrets += [AZURE_KEY, *signed, *map(quote_plus, signed)]
    secrets += [own.secret_access_key, own.access_key_id, *NEEDLES, *(str(key) for key in session_keys), *exchanged]

    assert seen.leaks(secrets) == []

    # What was looked for was there to be found: libraries say it at DEBUG, and every place holds what it should.
    assert {"token": len(exchanged) > 20, "session": len(sessions) > 3} == {"token": True, "session": True}
    assert any(str(keys.session_token) in seen.libraries.getvalue() for keys in sessions)
    assert "mirror failed" in seen.log.getvalue()
    assert "AUTH_REQUIRED" in seen.rows
    assert "event: done" in "".join(seen.answers)
    assert {path.name for path in await asyncio.to_thread(lambda: list(tmp_path.iterdir()))} >= KEY_FILES


async def _failures(
    mirror: MirrorUnderTest, clouds: Clouds, hub: Hub, azure: AzureServer, places: dict[str, Json]
) -> None:
    """Each source with each wrong secret, each token service failing in each way, each upstream echoing what it was sent."""
    for names in (
        {"hf": "bad-token", "s3": "bad-json", "r2": "bad-keys", "gs": "bad-account"},
        {"hf": "bad-text", "s3": "bad-keys", "r2": "bad-account", "gs": "bad-json"},
        {"hf": "bad-json", "s3": "bad-text", "gs": "bad-keys", "azure": "bad-account"},
    ):
        wanted = [{**places[scheme], **with_secret(name)} for scheme, name in names.items()]
        assert set((await _ends(mirror, wanted)).values()) == {"FAILED"}
        for one in wanted:
            await mirror.post(one, dry_run=True)
    signed_in = [places[method] for method in ("AWS_OIDC", "AWS_ASSUME_ROLE", "GCP_OIDC")]
    scripts = (clouds.sts.script, clouds.google.script)
    for fault in (answer(503, body=ECHO), answer(403, body=ECHO), answer(200, body=ECHO), rate_limited(1), drop()):
        for script in scripts:
            script.add(fault, times=None)
        assert set((await _ends(mirror, signed_in)).values()) == {"FAILED"}
        for script in scripts:
            script.clear()
    trusted = dict(clouds.sts.roles), dict(clouds.google.providers), dict(clouds.google.accounts)
    for kept in (clouds.google.accounts, clouds.google.providers, clouds.sts.roles):
        kept.clear()
        aws = "READY" if clouds.sts.roles else "FAILED"
        assert await _ends(mirror, signed_in) == {"/aws-oidc": aws, "/aws-role": aws, "/gcp-oidc": "FAILED"}
    clouds.sts.roles, clouds.google.providers, clouds.google.accounts = trusted
    for script, path, methods in (
        (hub.script, "safetensors", ["hf"]),
        (clouds.s3.script, "big.bin", ["s3", "r2"]),
        (clouds.gcs.script, "big.bin", ["gs", "GCP_OIDC"]),
        (azure.script, "big.bin", ["azure"]),
    ):
        denied, failed, wrong = (answer(status, body=ECHO) for status in (403, 500, 200))
        for fault in (denied, failed, wrong, *((answer(412), truncate(0), drop()) if "s3" in methods else ())):
            script.add(fault, path, times=None)
            await watched(mirror, *(places[method] for method in methods))
            script.clear()


async def _ends(mirror: MirrorUnderTest, wanted: list[Json]) -> dict[str, str]:
    """Of one mirror of all these: how each ended, by its mount."""
    return {part["mount_location"]: part["status"] for part in (await watched(mirror, *wanted))["sources"]}
