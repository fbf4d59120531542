"""Workload identity through the whole mirror: signing in, its documents, renewal in the middle of a copy, and each way to fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.pace.retry import RetryPolicy
from bdn.mirror.settings import MirrorSettings
from bdn.settings import SettingsError
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import Fault, answer, drop, rate_limited, stall
from tests.doubles.google_sts import Provider, ServiceAccount
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.doubles.s3 import S3Bucket
from tests.doubles.sts import AccountTrust, WebTrust, sts_error
from tests.support.content.cloud_identity import (
    ASSUMED_ROLE,
    ISSUER,
    POOL,
    PROVIDER,
    REGION,
    ROLE,
    SUBJECTS,
    Clouds,
    aws_assume_role,
    aws_oidc,
    gcp_oidc,
    trusted_mirror,
)
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")


@pytest.fixture
async def mirror(clouds: Clouds, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with trusted_mirror(clouds, tmp_path) as mirror:
        yield mirror


@pytest.fixture
def uri(bucket: S3Bucket) -> str:
    return f"s3://{bucket.name}/w"


async def test_a_role_is_taken_with_the_mirrors_identity(
    clouds: Clouds, bucket: S3Bucket, mirror: MirrorUnderTest
) -> None:
    bucket.put({"w/a.bin": b"weights"})
    document = await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
    assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
    (session,) = clouds.sts.sessions
    assert session.role == ROLE
    assert session.subject == f"v=1:org=default:job={document['id']}:type=mirror"
    assert session.name == f"default@{document['id']}"
    assert "authorization" not in clouds.sts.log.find()[0].headers
    assert (await mirror.plan(aws_oidc(f"s3://{bucket.name}/w")))["files"] == 1
    assert clouds.sts.sessions[1].subject == "v=1:org=default:job=plan:type=mirror"  # a dry run has no mirror


async def test_a_role_is_assumed_with_the_external_id(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path, issuer_url="") as mirror:
        document = await mirror.ready(aws_assume_role(f"s3://{bucket.name}/w"))
        (session,) = clouds.sts.sessions
        assert (session.role, session.name) == (ASSUMED_ROLE, f"default@{document['id']}")
        assert clouds.sts.bodies[0]["ExternalId"] == "bdn:default"


async def test_a_service_account_is_impersonated_with_the_mirrors_identity(
    clouds: Clouds, mirror: MirrorUnderTest
) -> None:
    bucket = clouds.gcs.bucket("weights")
    bucket.put({"w/a.bin": b"weights"})
    document = await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
    assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
    (federated,) = clouds.google.federated.values()
    assert federated[1] == f"v=1:org=default:job={document['id']}:type=mirror"
    assert len(clouds.google.issued) == 1


# --- The mirror as an OpenID issuer ---
DOCUMENTS = ("/.well-known/openid-configuration", "/.well-known/jwks.json")


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
            absent = await mirror.http.get(path)
            assert absent.status_code == 404
            assert "BDN_ISSUER_URL" in absent.json()["error"]["message"]
    assert not (tmp_path / "identity-key.pem").exists()


def test_an_address_that_clouds_cannot_use_is_refused(tmp_path: Path) -> None:
    wrong = ("http://mirror.test", "mirror.test", "https://", "https://u:p@mirror.test", "https://m.test/?a")
    for url in (*wrong, "https://m.test/#a"):
        with pytest.raises(SettingsError, match=r"BDN_ISSUER_URL: .*https address"):
            MirrorSettings(data_dir=tmp_path, issuer_url=url)
    assert MirrorSettings(data_dir=tmp_path, issuer_url=f"{ISSUER}/").issuer_url == ISSUER


# --- Credentials end in the middle of a long copy: they are renewed, seldom, and no byte is lost ---
CHUNKS = 5
CONTENT = GeneratedContent(CHUNKS * CHUNK_SIZE)


def each_range(log: RequestLog, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do this whenever a range of the big file is asked for, before it is answered."""
    add = log.add

    def adding(request: LoggedRequest) -> None:
        if "big.bin" in request.target and request.method == "GET" and "range" in request.headers:
            act()
        add(request)

    monkeypatch.setattr(log, "add", adding)


@pytest.mark.parametrize("wanted", [aws_oidc, aws_assume_role, gcp_oidc])
async def test_a_copy_that_takes_hours_signs_in_again(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Callable[..., Json]
) -> None:
    is_google = wanted is gcp_oidc
    content = bytes(CONTENT.read(0, CONTENT.size))
    (clouds.gcs.bucket("weights") if is_google else bucket).put({"w/big.bin": content})
    cloud = clouds.gcs if is_google else clouds.s3
    each_range(cloud.log, lambda: clouds.clock.advance(25 * 60), monkeypatch)
    place = ("gs://weights/w", clouds.gcs.account.email) if is_google else (f"s3://{bucket.name}/w",)
    # Its claim runs out with each jump of the clock: there is no second job that would take it.
    async with trusted_mirror(clouds, tmp_path, transfers=1, jobs=1) as mirror:
        document = await mirror.ready(wanted(*place))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"big.bin": content}
    # An hour is over at every third request of 25 minutes each. That one is refused, the role is taken again, and then one
    # more is made: so each session reads two ranges, and the next one begins with the third request.
    refused = [request for request in cloud.log.find("big.bin") if request.status == (401 if is_google else 403)]
    sessions = {session.account.access_key_id for session in clouds.sts.sessions}
    assert len(clouds.google.issued if is_google else sessions) == len(refused) + 1 == CHUNKS // 2 + 1


async def test_a_role_that_is_withdrawn_in_the_middle_ends_the_copy_and_publishes_nothing(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put({"w/big.bin": bytes(CONTENT.read(0, 3 * CHUNK_SIZE))})

    def withdraw() -> None:
        clouds.sts.roles.clear()
        clouds.clock.advance(25 * 60)

    each_range(clouds.s3.log, withdraw, monkeypatch)
    async with trusted_mirror(clouds, tmp_path, transfers=1, jobs=1) as mirror:
        error = await mirror.failed(aws_oidc(f"s3://{bucket.name}/w"))
    assert error["code"] == "AUTH_REQUIRED"
    assert "trust policy" in error["message"]


async def test_a_mirror_is_canceled_while_sts_is_silent(clouds: Clouds, uri: str, mirror: MirrorUnderTest) -> None:
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights"})
    clouds.google.script.add(stall(), times=None)
    clouds.sts.script.add(stall(), times=None)
    for wanted, log in (
        (gcp_oidc("gs://weights/w", clouds.gcs.account.email), clouds.google.log),
        (aws_oidc(uri), clouds.sts.log),
    ):
        begun = await mirror.begin(wanted)
        await asyncio.to_thread(log.wait_for, "/")
        await mirror.http.post(f"/mirror/{begun['id']}/cancel")
        assert (await mirror.ended(begun["id"]))["status"] == "CANCELED"


# --- Each way in which a token service refuses or fails, as the user of the mirror sees it ---
XML = {"Content-Type": "text/xml"}


def told(error: Json, code: str, *facts: str) -> None:
    assert error["code"] == code, error
    assert [fact for fact in facts if fact not in error["message"]] == [], error["message"]
    assert "\n" not in error["message"]


def sts_fault(status: int, code: str) -> Fault:
    return answer(status, XML, sts_error(code))


# --- AWS_OIDC --------------------------------------------------------------------------------------------------------

HOST = ISSUER.removeprefix("https://")
WEB_TRUSTS: list[tuple[WebTrust | None, str, list[str]]] = [
    (None, "AccessDenied", ["trust policy", "sts:AssumeRoleWithWebIdentity", SUBJECTS]),
    (WebTrust(ISSUER, "v=1:org=acme:*"), "AccessDenied", [f"{HOST}:sub is like {SUBJECTS}"]),
    (WebTrust(ISSUER, "*", "oidc.example"), "InvalidIdentityToken", ["sts.amazonaws.com", ISSUER]),
    (WebTrust("https://other.test", "*"), "InvalidIdentityToken", ["OpenID Connect provider", ISSUER]),
]


async def test_a_role_without_trust_says_what_to_change(clouds: Clouds, uri: str, mirror: MirrorUnderTest) -> None:
    for trust, code, facts in WEB_TRUSTS:
        clouds.sts.log.clear()
        clouds.sts.roles.pop(ROLE, None)
        if trust:
            clouds.sts.roles[ROLE] = trust
        error = await mirror.failed(aws_oidc(uri))
        told(error, "AUTH_REQUIRED", uri, ROLE, code, *facts)
        assert clouds.sts.log.count() == 1  # a refusal is not asked for again
    assert clouds.sts.sessions == []


async def test_a_mirror_whose_clock_is_slow_is_told_so(clouds: Clouds, uri: str, tmp_path: Path) -> None:
    async with trusted_mirror(clouds, tmp_path, clock=lambda: clouds.clock() - 3600) as mirror:
        error = await mirror.failed(aws_oidc(uri))
    told(error, "AUTH_REQUIRED", "ExpiredTokenException", "clock")


STS_FAULTS: list[tuple[str, Fault, str, list[str]]] = [
    ("issuer unreachable", sts_fault(400, "IDPCommunicationError"), "UPSTREAM_UNAVAILABLE", [ISSUER, "public keys"]),
    ("claim refused", sts_fault(403, "IDPRejectedClaim"), "AUTH_REQUIRED", [ROLE, "IDPRejectedClaim"]),
    ("policy malformed", sts_fault(400, "MalformedPolicyDocument"), "AUTH_REQUIRED", ["MalformedPolicyDocument"]),
    ("region off", sts_fault(403, "RegionDisabledException"), "AUTH_REQUIRED", [REGION, "Activate", "123456789012"]),
    ("throttled", sts_fault(400, "Throttling"), "UPSTREAM_RATE_LIMITED", []),
    ("429", rate_limited(1), "UPSTREAM_RATE_LIMITED", ["1 s"]),
    ("503", sts_fault(503, "ServiceUnavailable"), "UPSTREAM_UNAVAILABLE", ["AWS STS answered 503 ServiceUnavailable"]),
    ("500 without a body", answer(500, body=b""), "UPSTREAM_UNAVAILABLE", ["500"]),
    ("network", drop(), "UPSTREAM_UNAVAILABLE", ["AWS STS did not answer"]),
    ("not XML", answer(200, XML, b"<html>sesame"), "UPSTREAM_UNAVAILABLE", ["AWS STS"]),
    ("another XML", answer(200, XML, b"<a><b>sesame</b></a>"), "UPSTREAM_UNAVAILABLE", ["does not look like"]),
]


async def test_a_failure_of_sts_that_passes_is_survived(
    clouds: Clouds, bucket: S3Bucket, mirror: MirrorUnderTest
) -> None:
    bucket.put({"w/a.bin": b"weights"})
    for sessions, fault in enumerate((sts_fault(503, "ServiceUnavailable"), rate_limited(1), drop())):
        clouds.sts.script.add(fault, times=2)
        await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
        assert len(clouds.sts.sessions) == sessions + 1
        assert clouds.sts.log.count() == (sessions + 1) * 3


async def test_an_identity_token_does_not_follow_a_redirect(clouds: Clouds, uri: str, mirror: MirrorUnderTest) -> None:
    clouds.sts.script.add(answer(307, {"Location": clouds.google.sts_url}, b""), times=None)
    error = await mirror.failed(aws_oidc(uri))
    told(error, "UPSTREAM_UNAVAILABLE", "AWS STS answered 307")
    assert clouds.google.log.count() == 0


async def test_a_role_that_may_not_read_the_bucket_is_told_so(
    clouds: Clouds, bucket: S3Bucket, mirror: MirrorUnderTest
) -> None:
    clouds.s3.fail(answer(403, XML, b"<Error><Code>AccessDenied</Code></Error>"), "list-type", times=None)
    error = await mirror.failed(aws_oidc(f"s3://{bucket.name}/w"))
    told(
        error,
        "AUTH_REQUIRED",
        "AccessDenied",
        bucket.name,
        "a role or a service account, that identity may not read the source",
    )
    assert len(clouds.sts.sessions) == 1


# --- AWS_ASSUME_ROLE -------------------------------------------------------------------------------------------------


async def test_another_organisations_role_is_refused(clouds: Clouds, uri: str, mirror: MirrorUnderTest) -> None:
    clouds.sts.roles[ASSUMED_ROLE] = AccountTrust("AKIAOPERATOR", "bdn:acme")
    error = await mirror.failed(aws_assume_role(uri))
    told(error, "AUTH_REQUIRED", "AccessDenied", ASSUMED_ROLE, '"sts:ExternalId": "bdn:default"', "trust policy")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIASOMEBODY", "InvalidClientTokenId"),
        ("AWS_SECRET_ACCESS_KEY", "sesame", "SignatureDoesNotMatch"),
        ("AWS_SESSION_TOKEN", "its session has ended", "ExpiredToken"),
    ],
)
async def test_wrong_keys_of_the_mirror_s_own_are_the_operator_s_business(
    clouds: Clouds, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str
) -> None:
    if code == "ExpiredToken":
        clouds.sts.script.add(sts_fault(403, code))
    else:
        monkeypatch.setenv(name, value)
    async with trusted_mirror(clouds, tmp_path) as mirror:
        error = await mirror.failed(aws_assume_role(uri))
    told(error, "AUTH_REQUIRED", code, "operator", "AWS_SECRET_ACCESS_KEY" if code != "ExpiredToken" else name)
    assert value not in repr(error)


async def test_without_keys_of_its_own_the_mirror_cannot_assume_roles(
    clouds: Clouds, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    async with trusted_mirror(clouds, tmp_path) as mirror:
        error = await mirror.failed(aws_assume_role(uri))
    told(error, "INVALID_REQUEST", "AWS_ASSUME_ROLE", "operator has to set AWS_ACCESS_KEY_ID")
    assert clouds.sts.log.count() == 0


# --- GCP_OIDC --------------------------------------------------------------------------------------------------------

Change = Callable[[Clouds], Any]
NOT_TAKEN = [PROVIDER, "rejected this mirror's identity token", ISSUER, SUBJECTS]
NOT_LENT = ["cannot be impersonated", "roles/iam.workloadIdentityUser", POOL, SUBJECTS]
GOOGLE_REFUSALS: list[tuple[str, Change, str, list[str]]] = [
    ("no provider", lambda c: c.google.providers.clear(), "invalid_target", NOT_TAKEN),
    ("condition", lambda c: _set(c, Provider(ISSUER, "v=1:org=acme:*")), "unauthorized_client", NOT_TAKEN),
    ("issuer", lambda c: _set(c, Provider("https://other.test")), "invalid_grant", NOT_TAKEN),
    ("no account", lambda c: c.google.accounts.clear(), "NOT_FOUND", NOT_LENT),
    ("no binding", lambda c: _lend(c, ServiceAccount()), "PERMISSION_DENIED", NOT_LENT),
    ("binding of another", lambda c: _lend(c, ServiceAccount({POOL: "v=1:org=acme:*"})), "PERMISSION_DENIED", NOT_LENT),
]


def _set(clouds: Clouds, provider: Provider) -> None:
    clouds.google.providers[PROVIDER] = provider


def _lend(clouds: Clouds, account: ServiceAccount) -> None:
    clouds.google.accounts[clouds.gcs.account.email] = account


async def test_a_refusal_of_google_says_who_refused_and_what_to_change(clouds: Clouds, mirror: MirrorUnderTest) -> None:
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights"})
    for _, change, code, facts in GOOGLE_REFUSALS:
        _set(clouds, Provider(ISSUER, SUBJECTS))
        _lend(clouds, ServiceAccount({POOL: SUBJECTS}))
        change(clouds)
        error = await mirror.failed(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        told(error, "AUTH_REQUIRED", "gs://weights/w", code, *facts)
        assert "eyJ" not in repr(error)  # the double repeats the token in its description
    assert clouds.google.issued == []


JSON = {"Content-Type": "application/json"}
GOOGLE_FAULTS: list[tuple[str, Fault, str, list[str]]] = [
    ("429", rate_limited(1), "UPSTREAM_RATE_LIMITED", ["1 s"]),
    ("503", answer(503, JSON, b'{"error": {"status": "UNAVAILABLE"}}'), "UPSTREAM_UNAVAILABLE", ["503 UNAVAILABLE"]),
    ("network", drop(), "UPSTREAM_UNAVAILABLE", ["did not answer the request for a token"]),
    ("not JSON", answer(200, JSON, b"<html>sesame"), "UPSTREAM_UNAVAILABLE", ["does not look like Google's"]),
    ("another JSON", answer(200, JSON, b'{"sesame": 1}'), "UPSTREAM_UNAVAILABLE", ["does not look like Google's"]),
    ("no object", answer(200, JSON, b"[1]"), "UPSTREAM_UNAVAILABLE", ["does not look like Google's"]),
    ("redirect", answer(302, {"Location": "http://127.0.0.1:1/"}), "UPSTREAM_UNAVAILABLE", ["302"]),
    ("400 of something else", answer(400, body=b"<html>sesame"), "AUTH_REQUIRED", ["400"]),
]


@pytest.mark.parametrize("path", ["sts", "/v1/token", "generateAccessToken"])
async def test_a_failure_of_a_token_service_is_told_by_its_code(
    clouds: Clouds, uri: str, mirror: MirrorUnderTest, path: str
) -> None:
    clouds.gcs.bucket("weights")
    is_aws = path == "sts"
    wanted = aws_oidc(uri) if is_aws else gcp_oidc("gs://weights/w", clouds.gcs.account.email)
    script = clouds.sts.script if is_aws else clouds.google.script
    for _, fault, code, facts in STS_FAULTS if is_aws else GOOGLE_FAULTS:
        script.clear()
        script.add(fault, "" if is_aws else path, times=None)
        error = await mirror.failed(wanted)
        told(error, code, wanted["source"], *facts)
        assert error["retryable"] == (code != "AUTH_REQUIRED")
        assert "sesame" not in repr(error)
        assert "eyJ" not in repr(error)


async def test_a_failure_of_google_that_passes_is_survived(clouds: Clouds, mirror: MirrorUnderTest) -> None:
    clouds.gcs.bucket("weights").put({"w/a.bin": b"weights"})
    for issued, path in enumerate(("/v1/token", "generateAccessToken")):
        clouds.google.script.add(answer(503), path, times=2)
        await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        assert len(clouds.google.issued) == issued + 1


async def test_token_services_do_not_multiply_attempts(clouds: Clouds, uri: str, mirror: MirrorUnderTest) -> None:
    clouds.gcs.bucket("weights")
    clouds.sts.script.add(answer(503), times=None)
    clouds.google.script.add(answer(503), times=None)
    await mirror.failed(aws_oidc(uri))
    await mirror.failed(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
    assert clouds.sts.log.count() == clouds.google.log.count() == RetryPolicy().attempts


# --- before anybody is asked -----------------------------------------------------------------------------------------

BUCKET = "s3://bucket/w"
ACCOUNT = "reader@double.iam.gserviceaccount.com"
MALFORMED: list[tuple[Json, str]] = [
    (aws_oidc(BUCKET, role="arn:aws:iam::1234:role/x"), "ARN of a role"),
    (aws_assume_role(BUCKET, role="weights"), "ARN of a role"),
    (aws_oidc(BUCKET, region="evil.example/?"), "region of AWS"),
    (aws_assume_role(BUCKET, region="US-EAST-1"), "region of AWS"),
    (gcp_oidc("gs://bucket", "reader@example.com"), "service account"),
    (gcp_oidc("gs://bucket", ACCOUNT, provider=f"//evil.example/{PROVIDER}"), "workload identity provider"),
]  # more of each kind: tests/unit/sources/test_settings.py


async def test_names_that_are_not_a_cloud_s_are_refused_when_they_are_sent(clouds: Clouds, tmp_path: Path) -> None:
    async with trusted_mirror(clouds, tmp_path, work=False) as mirror:
        for (wanted, fact), dry_run in product(MALFORMED, (False, True)):
            refused = await mirror.post(wanted, dry_run=dry_run)
            assert refused.status_code == 422
            told(refused.json()["error"], "INVALID_REQUEST", fact)
        assert mirror.count("mirrors") == 0
    assert clouds.sts.log.count() == clouds.google.log.count() == 0


async def test_a_mirror_without_an_address_as_an_issuer_says_what_to_set(clouds: Clouds, tmp_path: Path) -> None:
    async with trusted_mirror(clouds, tmp_path, issuer_url="", work=False) as mirror:
        for wanted in (aws_oidc("s3://bucket/w"), gcp_oidc("gs://bucket", ACCOUNT)):
            refused = await mirror.post(wanted)
            assert refused.status_code == 422
            told(refused.json()["error"], "INVALID_REQUEST", "BDN_ISSUER_URL", wanted["auth"]["auth_method"])
