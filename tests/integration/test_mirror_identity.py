"""Workload identity through the whole mirror: signing in, its OpenID documents, and renewal in the middle of a copy."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest
from pydantic import ValidationError

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import InvalidRequestError
from bdn.mirror.app import open_mirror
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.issuer import IdentityIssuer, IdentityKeys, TokenSubject, load_issuer, new_identity_key
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import answer, stall
from tests.doubles.openid import OpenIdReader
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.doubles.s3 import S3Bucket
from tests.doubles.sts import sts_error
from tests.support.content.cloud_identity import (
    ASSUMED_ROLE,
    ROLE,
    Clouds,
    aws_assume_role,
    aws_oidc,
    gcp_oidc,
    trusted_mirror,
)
from tests.support.mirror.service import Json, mirror_under_test

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")


async def test_a_role_is_taken_with_the_mirrors_identity(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path) as mirror:
        document = await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
        (session,) = clouds.sts.sessions
        assert session.role == ROLE
        assert session.subject == f"v=1:org=default:job={document['id']}:type=mirror"
        assert session.name == f"default@{document['id']}"
        assert "authorization" not in clouds.sts.log.find()[0].headers


async def test_a_dry_run_names_no_mirror(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path, work=False) as mirror:
        assert (await mirror.plan(aws_oidc(f"s3://{bucket.name}/w")))["files"] == 1
    assert clouds.sts.sessions[0].subject == "v=1:org=default:job=plan:type=mirror"


async def test_a_role_is_assumed_with_the_external_id(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path, issuer_url="") as mirror:
        document = await mirror.ready(aws_assume_role(f"s3://{bucket.name}/w"))
        (session,) = clouds.sts.sessions
        assert (session.role, session.name) == (ASSUMED_ROLE, f"default@{document['id']}")
        assert clouds.sts.bodies[0]["ExternalId"] == "bdn:default"


async def test_a_service_account_is_impersonated_with_the_mirrors_identity(clouds: Clouds, tmp_path: Path) -> None:
    bucket = clouds.gcs.bucket("weights")
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path) as mirror:
        document = await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
        (federated,) = clouds.google.federated.values()
        assert federated[1] == f"v=1:org=default:job={document['id']}:type=mirror"
        assert len(clouds.google.issued) == 1


# --- The mirror as an OpenID issuer: what it serves, to whom, and with which keys ---
ISSUER = "https://mirror.example.test/tenant"
DOCUMENTS = ("/.well-known/openid-configuration", "/.well-known/jwks.json")
SUBJECT = TokenSubject("acme", "mir_1")


async def test_the_documents_are_public_and_cacheable_where_everything_else_needs_a_token(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path, auth="token", token="t", issuer_url=ISSUER, work=False) as mirror:
        discovery, jwks = [await mirror.http.get(path) for path in DOCUMENTS]
        assert (await mirror.http.get("/mirror")).status_code == 401
    for document in (discovery, jwks):
        assert document.status_code == 200
        assert document.headers["cache-control"] == "public, max-age=3600"
        assert document.headers["content-type"] == "application/json"
    assert discovery.json() == {
        "issuer": ISSUER,
        "jwks_uri": f"{ISSUER}/.well-known/jwks.json",
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["RS256"],
        "claims_supported": ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "organisation", "job"],
    }
    assert [set(key) for key in jwks.json()["keys"]] == [{"kty", "n", "e", "kid", "alg", "use"}]


async def test_without_an_address_there_are_no_documents_and_no_key(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path, work=False) as mirror:
        for path in DOCUMENTS:
            answer = await mirror.http.get(path)
            assert answer.status_code == 404
            assert "BDN_ISSUER_URL" in answer.json()["error"]["message"]
    assert not (tmp_path / "identity-key.pem").exists()


async def test_the_key_stays_over_a_restart(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        async with mirror_under_test(tmp_path, issuer_url=ISSUER, work=False) as mirror:
            seen.append((await mirror.http.get(DOCUMENTS[1])).json())
    assert seen[0] == seen[1]
    assert (tmp_path / "identity-key.pem").stat().st_mode & 0o777 == 0o600


async def test_a_key_is_changed_without_a_moment_in_which_tokens_are_refused(tmp_path: Path) -> None:
    old, new = new_identity_key(), new_identity_key()
    file = tmp_path / "keys.pem"
    reader = OpenIdReader(time.time)
    kids: list[list[str]] = []
    # published · signing · the old one gone; at each step also tokens of the step before are taken
    before = IdentityIssuer(ISSUER, IdentityKeys.parse(old))
    for bundle in (old, old + new, new + old, new):
        file.write_bytes(bundle)
        async with mirror_under_test(
            tmp_path / "mirror", issuer_url=ISSUER, identity_key_file=file, work=False
        ) as mirror:
            listener = bind_tcp("127.0.0.1", 0)
            reader.reach[ISSUER] = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with serving(mirror.service.api, listener):
                issuer = IdentityIssuer(ISSUER, IdentityKeys.parse(bundle))
                for signer in (before, issuer):
                    token = signer.token(SUBJECT, "sts.amazonaws.com")
                    await _claims(reader, token)
                before = issuer
                kids.append([key["kid"] for key in (await mirror.http.get(DOCUMENTS[1])).json()["keys"]])
    assert kids == [kids[0], [*kids[0], *kids[3]], [*kids[3], *kids[0]], kids[3]]


async def _claims(reader: OpenIdReader, token: str) -> dict[str, object]:
    return await asyncio.to_thread(reader.claims, token, issuer=ISSUER, audience="sts.amazonaws.com")


def test_a_token_says_who_asks_and_soon_ends() -> None:
    keys = IdentityKeys.parse(new_identity_key())
    issuer = IdentityIssuer(ISSUER, keys, lambda: 1000.9)
    tokens = [issuer.token(SUBJECT, "a") for _ in range(2)]
    claims, other = (jwt.decode(token, options={"verify_signature": False}) for token in tokens)
    assert claims.pop("jti") != other.pop("jti")
    assert (
        claims
        == other
        == {
            "iss": ISSUER,
            "aud": "a",
            "sub": "v=1:org=acme:job=mir_1:type=mirror",
            "iat": 970,
            "nbf": 970,
            "exp": 1600,
            "organisation": "acme",
            "job": "mir_1",
        }
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://mirror.test",
        "mirror.test",
        "https://",
        "https://u:p@mirror.test",
        "https://m.test/?a",
        "https://m.test/#a",
    ],
)
def test_an_address_that_clouds_cannot_use_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValidationError, match="https address"):
        MirrorSettings(data_dir=tmp_path, issuer_url=url)


def test_a_slash_at_the_end_of_the_address_is_left_out(tmp_path: Path) -> None:
    assert MirrorSettings(data_dir=tmp_path, issuer_url=f"{ISSUER}/").issuer_url == ISSUER


def test_replicas_that_would_each_make_a_key_of_their_own_do_not_start(tmp_path: Path) -> None:
    settings = MirrorSettings(data_dir=tmp_path, issuer_url=ISSUER, database_url="postgresql+asyncpg://db/bdn")
    with pytest.raises(InvalidRequestError, match="BDN_IDENTITY_KEY_FILE"):
        load_issuer(settings, time.time)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "keys.pem").write_bytes(new_identity_key())
    issuers = [
        load_issuer(
            settings.model_copy(update={"data_dir": tmp_path / name, "identity_key_file": tmp_path / "keys.pem"}),
            time.time,
        )
        for name in ("a", "b")
    ]
    assert issuers[0] is not None
    assert issuers[1] is not None
    assert issuers[0].jwks() == issuers[1].jwks()


async def test_a_key_file_that_cannot_be_used_is_told_before_anything_is_served(tmp_path: Path) -> None:
    settings = MirrorSettings(data_dir=tmp_path, issuer_url=ISSUER, identity_key_file=tmp_path / "absent")
    with pytest.raises(InvalidRequestError, match="absent cannot be read"):
        async with open_mirror(settings, serve=False, work=False):
            pass


# --- Credentials end in the middle of a long copy: they are renewed, seldom, and no byte is lost ---
CHUNKS = 5
CONTENT = GeneratedContent(CHUNKS * CHUNK_SIZE)


Wanted = Callable[[str], Json]


def each_range(log: RequestLog, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do this whenever a range of the big file is asked for, before it is answered."""
    add = log.add

    def adding(request: LoggedRequest) -> None:
        if "big.bin" in request.target and request.method == "GET" and "range" in request.headers:
            act()
        add(request)

    monkeypatch.setattr(log, "add", adding)


@pytest.mark.parametrize("wanted", [aws_oidc, aws_assume_role])
async def test_a_copy_that_takes_hours_takes_the_role_again(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    content = bytes(CONTENT.read(0, CONTENT.size))
    bucket.put({"w/big.bin": content})
    each_range(clouds.s3.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        document = await mirror.ready(wanted(f"s3://{bucket.name}/w"))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"big.bin": content}
    # An hour is over at every third request of 25 minutes each. That one is refused, the role is taken again, and then one
    # more is made: so each session reads two ranges, and the next one begins with the third request.
    refused = [request for request in clouds.s3.log.find("big.bin") if request.status == 403]
    assert len(clouds.sts.sessions) == len(refused) + 1
    assert len(clouds.sts.sessions) == CHUNKS // 2 + 1
    assert len({session.account.access_key_id for session in clouds.sts.sessions}) == len(clouds.sts.sessions)


async def test_a_copy_that_takes_hours_gets_another_token(
    clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(CONTENT.read(0, CONTENT.size))
    clouds.gcs.bucket("weights").put({"w/big.bin": content})
    each_range(clouds.gcs.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        document = await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"big.bin": content}
    refused = [request for request in clouds.gcs.log.find("big.bin") if request.status == 401]
    assert len(clouds.google.issued) == len(refused) + 1 == CHUNKS // 2 + 1


async def test_a_renewal_that_fails_for_a_while_does_not_end_the_copy(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(CONTENT.read(0, 3 * CHUNK_SIZE))
    bucket.put({"w/big.bin": content})
    each_range(clouds.s3.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    clouds.sts.script.add(answer(503, {}, sts_error("ServiceUnavailable")), skip=1, times=3)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
    assert len(clouds.sts.sessions) == 2
    assert clouds.sts.log.count() == 2 + 3


async def test_a_role_that_is_withdrawn_in_the_middle_ends_the_copy_and_publishes_nothing(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put({"w/big.bin": bytes(CONTENT.read(0, 3 * CHUNK_SIZE))})

    def withdraw() -> None:
        clouds.sts.roles.clear()
        clouds.clock.advance(25 * 60)

    each_range(clouds.s3.log, withdraw, monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1) as mirror:
        error = await mirror.failed(aws_oidc(f"s3://{bucket.name}/w"))
    assert error["code"] == "AUTH_REQUIRED"
    assert "trust policy" in error["message"]


async def test_many_files_at_once_take_the_role_once(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({f"w/{number:03}.bin": f"weights {number}".encode() for number in range(120)})
    async with trusted_mirror(clouds, tmp_path) as mirror, asyncio.TaskGroup() as group:
        for place in ("a", "b"):
            group.create_task(mirror.ready(aws_oidc(f"s3://{bucket.name}/w", f"/{place}")))
    assert len(clouds.sts.sessions) == 2  # one for each mirror
    assert len({session.name for session in clouds.sts.sessions}) == 2


async def test_a_mirror_is_canceled_while_sts_is_silent(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights"})
    clouds.google.script.add(stall(), times=None)
    clouds.sts.script.add(stall(), times=None)
    async with trusted_mirror(clouds, tmp_path) as mirror:
        for wanted, log in (
            (gcp_oidc("gs://weights/w", clouds.gcs.account.email), clouds.google.log),
            (aws_oidc(f"s3://{bucket.name}/w"), clouds.sts.log),
        ):
            begun = await mirror.begin(wanted)
            await asyncio.to_thread(log.wait_for, "/")
            await mirror.http.post(f"/mirror/{begun['id']}/cancel")
            assert (await mirror.ended(begun["id"]))["status"] == "CANCELED"
