"""No secret, token or signed address is in any log line, error, event, database row, manifest or file, however one signs in.

Every method succeeds and fails with distinctive values while everything that can be seen or kept is collected.
"""

import asyncio
import base64
import json
from pathlib import Path

import pytest

from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, drop, rate_limited, truncate
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket
from tests.support.content.cloud_identity import Clouds, aws_assume_role, aws_oidc, gcp_oidc, trusted_mirror
from tests.support.mirror.secret_search import KEY_FILES, Seen, logging_like_a_program, text_of
from tests.support.mirror.service import Json, MirrorUnderTest, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")

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
def places(clouds: Clouds, hub: Hub, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Json]:
    """What every method reads, by the method's name; all secrets but two are in the encrypted table."""
    monkeypatch.setenv("BDN_R2_ENDPOINT_URL", clouds.s3.url)
    for name, value in WRONG.items():
        monkeypatch.setenv(f"BDN_SECRET_{name.upper().replace('-', '_')}", value)
    monkeypatch.setenv("BDN_GOOGLE_TOKEN_URL", clouds.gcs.token_url)
    content = GeneratedContent(3 * 2**19)  # too big for a slab
    hub.repo("org/private", private=True).commit({"model.safetensors": content, "small.json": b"{}"})
    bucket.put({"w/a.bin": b"weights", "w/big.bin": content.read(0, content.size)})
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights", "w/big.bin": content.read(0, content.size)})
    uri = f"s3://{bucket.name}/w"
    return {
        "hf": source("hf://org/private", "/hf", **with_secret("hub-token")),
        "s3": source(uri, "/s3", **with_secret("table-keys")),
        "r2": source(f"r2://account.{bucket.name}/w", "/r2", **with_secret("table-keys")),
        "gs": source("gs://weights/w", "/gs", **with_secret("table-account")),
        "AWS_OIDC": aws_oidc(uri),
        "AWS_ASSUME_ROLE": aws_assume_role(uri),
        "GCP_OIDC": gcp_oidc("gs://weights/w", clouds.gcs.account.email),
    }


async def test_no_secret_token_or_signed_address_is_shown_or_kept(
    clouds: Clouds, hub: Hub, places: dict[str, Json], tmp_path: Path
) -> None:
    seen = Seen()
    account = clouds.gcs.account.key(clouds.gcs.token_url)
    keys = {
        "aws_access_key_id": clouds.s3.account.access_key_id,
        "aws_secret_access_key": clouds.s3.account.secret_access_key,
    }
    table = {"table-keys": json.dumps(keys), "table-account": json.dumps(account)}
    with logging_like_a_program(seen):
        options = {"auth": "token", "token": OPERATOR, "bearer": OPERATOR, "secrets_key": TABLE_KEY}
        async with trusted_mirror(clouds, tmp_path, identity_key_file=None, **options) as mirror:
            mirror.http.event_hooks["response"] = [seen.note]
            for name, value in table.items():
                assert (await mirror.http.put(f"/secrets/{name}", json={"value": value})).status_code == 200
            for name, value in WRONG.items():  # refused or kept, and the operator's own of this name is read
                await mirror.http.put(f"/secrets/{name}", json={"value": value})
            await _failures(mirror, clouds, hub, places)
            for name, wanted in places.items():
                assert (await watched(mirror, wanted))["status"] == "READY", name
                await mirror.plan(wanted)
            await _everything_else(mirror)
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
    own = clouds.sts.principals["AKIAOPERATOR"]
    secrets = [hub.token, *keys.values(), *account["private_key"].splitlines()[1:3], OPERATOR, TABLE_KEY, "sesame-echo"]
    secrets += [own.secret_access_key, own.access_key_id, *NEEDLES, *(str(key) for key in session_keys), *exchanged]

    assert seen.leaks(secrets) == []

    # What was looked for was there to be found: libraries say it at DEBUG, and every place holds what it should.
    assert {"token": len(exchanged) > 20, "session": len(sessions) > 3} == {"token": True, "session": True}
    assert any(str(keys.session_token) in seen.libraries.getvalue() for keys in sessions)
    assert "mirror failed" in seen.log.getvalue()
    assert "AUTH_REQUIRED" in seen.rows
    assert "event: done" in "".join(seen.answers)
    assert {path.name for path in await asyncio.to_thread(lambda: list(tmp_path.iterdir()))} >= KEY_FILES


async def _failures(mirror: MirrorUnderTest, clouds: Clouds, hub: Hub, places: dict[str, Json]) -> None:
    """Each source with each wrong secret, each token service failing in each way, each upstream echoing what it was sent."""
    for scheme, names in {
        "hf": ("bad-token", "bad-text", "bad-json"),
        "s3": ("bad-json", "bad-keys", "bad-text"),
        "r2": ("bad-keys", "bad-account"),
        "gs": ("bad-account", "bad-json", "bad-keys"),
    }.items():
        for name in names:
            wanted = {**places[scheme], **with_secret(name)}
            await _fail(mirror, wanted)
            await mirror.post(wanted, dry_run=True)
    scripts = (clouds.sts.script, clouds.google.script)
    for method in ("AWS_OIDC", "AWS_ASSUME_ROLE", "GCP_OIDC"):
        for fault in (answer(503, body=ECHO), answer(403, body=ECHO), answer(200, body=ECHO), rate_limited(1), drop()):
            for script in scripts:
                script.add(fault, times=None)
            await _fail(mirror, places[method])
            for script in scripts:
                script.clear()
    trusted = dict(clouds.sts.roles), dict(clouds.google.providers), dict(clouds.google.accounts)
    for kept in (clouds.google.accounts, clouds.google.providers, clouds.sts.roles):
        kept.clear()
        for method in ("AWS_OIDC", "AWS_ASSUME_ROLE", "GCP_OIDC"):
            document = await watched(mirror, places[method])
            assert document["status"] == ("READY" if method != "GCP_OIDC" and clouds.sts.roles else "FAILED"), document
    clouds.sts.roles, clouds.google.providers, clouds.google.accounts = trusted
    for place, (script, path) in {
        "hf": (hub.script, "safetensors"),
        "s3": (clouds.s3.script, "big.bin"),
        "gs": (clouds.gcs.script, "big.bin"),
    }.items():
        denied, failed, wrong = (answer(status, body=ECHO) for status in (403, 500, 200))
        for fault in (denied, failed, wrong, *((answer(412), truncate(0), drop()) if place == "s3" else ())):
            script.add(fault, path, times=None)
            for method in {"s3": ("s3", "r2"), "gs": ("gs", "GCP_OIDC")}.get(place, (place,)):
                await watched(mirror, places[method])
            script.clear()


async def _fail(mirror: MirrorUnderTest, wanted: Json) -> None:
    document = await watched(mirror, wanted)
    assert document["status"] == "FAILED", document


async def _everything_else(mirror: MirrorUnderTest) -> None:
    for path in ("/mirror?limit=1000", "/secrets", "/metrics", "/openapi.json", "/agents", "/clusters", "/nowhere"):
        await mirror.http.get(path)
    for path in ("/.well-known/openid-configuration", "/.well-known/jwks.json", "/healthz", "/readyz"):
        await mirror.http.get(path)
