"""Whatever goes wrong at S3 comes out of the source as one of our errors, after exactly one attempt."""

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SecretMalformedError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.opener import open_source
from bdn.sources.settings import S3Credentials, UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.contract.opening import Opened, keys_of
from tests.contract.source_contract import listed, seen_before
from tests.doubles.faults import Fault, answer, drop, truncate
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Bucket, S3Server
from tests.doubles.s3_errors import s3_error
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK

TEMPORARY = Account("ASIATEMPORARY", "temporary", "session-token")
PAGE = 2
FILES = [f"{number}.txt" for number in range(5)]
LARGE = UpstreamFile("a.bin", CHUNK_SIZE + 4, Identity.of("organisation:acme", "s3"), "m/a.bin", '"listed"')


@pytest.fixture(scope="module")
def filled(shared_s3_server: S3Server) -> S3Bucket:
    shared_s3_server.accounts[TEMPORARY.access_key_id] = TEMPORARY
    bucket = shared_s3_server.bucket("failures")
    bucket.put(dict.fromkeys(FILES, b"x"))
    shared_s3_server.bucket("failures-public", public=True).put({"a.txt": b"x"})
    return bucket


@pytest.fixture
def server(s3_server: S3Server, filled: S3Bucket) -> S3Server:
    s3_server.page_limit = PAGE
    return s3_server


def opened(
    server: S3Server,
    secret: str | None = None,
    *,
    bucket: str = "failures",
    ambient: bool = False,
    settings: UpstreamSettings | None = None,
) -> Opened:
    settings = settings or UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url)
    sign_in = Secret("bucket-keys", secret) if secret else None
    context = SourceContext("acme", settings, sign_in, ambient_credentials=ambient)
    return open_source(BucketUri("s3", bucket, ""), context)


async def test_the_older_key_names_of_a_secret_are_accepted(server: S3Server) -> None:
    async with opened(server, keys_of(server.account, prefix="")) as source:
        assert list(await listed(source)) == FILES


async def test_temporary_credentials_sign_listings_and_locations_with_their_token(server: S3Server) -> None:
    async with opened(server, keys_of(TEMPORARY)) as source:
        location = await source.locate((await listed(source))["0.txt"])
    assert read_range(location, 0, 1).content == b"x"


@pytest.mark.parametrize(("keys", "said"), [
    (None, "AccessDenied: anonymous reading is not allowed"),
    (Account("AKIANOBODY", "sesame"), "InvalidAccessKeyId"),
    (Account("AKIADOUBLE", "sesame"), "SignatureDoesNotMatch"),
    (Account("ASIATEMPORARY", "sesame"), "InvalidToken"),
])  # fmt: skip
async def test_wrong_credentials_are_told_apart_and_never_shown(
    server: S3Server, keys: Account | None, said: str
) -> None:
    async with opened(server, keys_of(keys) if keys else None) as source:
        with pytest.raises(AuthRequiredError, match=said) as raised:
            await listed(source)
    assert "sesame" not in str(raised.value)
    assert server.log.count() == 1


def error_answer(status: int, code: str, headers: dict[str, str] | None = None) -> Fault:
    document = s3_error(status, code).content
    assert isinstance(document, bytes)
    return answer(status, headers, document)


FAILURES = [
    (error_answer(403, "AccessDenied"), AuthRequiredError, "these credentials may not read it"),
    (error_answer(400, "ExpiredToken"), AuthRequiredError, "session token has expired"),
    (error_answer(403, "RequestTimeTooSkewed"), AuthRequiredError, "clock"),
    (error_answer(400, "AuthorizationHeaderMalformed"), InvalidSourceError, "another region"),
    (error_answer(403, "SecondLevelDomainForbidden"), InvalidSourceError, "BDN_SOURCE_S3_ADDRESSING=virtual"),
    (error_answer(403, "AllAccessDisabled"), SourceNotFoundError, "has disabled it"),
    (error_answer(503, "SlowDown"), UpstreamRateLimitedError, "limits our requests"),
    (error_answer(429, "TooManyRequests"), UpstreamRateLimitedError, "limits our requests"),
    (error_answer(503, "ServiceUnavailable"), UpstreamUnavailableError, "503 ServiceUnavailable"),
    (error_answer(500, "InternalError"), UpstreamUnavailableError, "500 InternalError"),
    (error_answer(404, "NoSuchBucket"), SourceNotFoundError, "bucket does not exist"),
    (error_answer(400, "InvalidRequest"), SourceNotFoundError, "400 InvalidRequest"),
    (answer(200, body=b"not a listing"), UpstreamUnavailableError, "is not XML"),
    (answer(200, body=b"<html><body>a proxy's page</body></html>"), UpstreamUnavailableError, "a document 'html'"),
    (error_answer(200, "InternalError"), UpstreamUnavailableError, "a document 'Error'"),
    (answer(200, body=b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"),
        UpstreamUnavailableError, "is truncated"),
    (answer(502, body=b"<html>a proxy's page</html>"), UpstreamUnavailableError, "502"),
    (drop(), UpstreamUnavailableError, "did not answer"),
    (truncate(10), UpstreamUnavailableError, "did not answer"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
@pytest.mark.parametrize(("query", "before"), [("", 0), ("continuation-token", PAGE)])
async def test_a_failing_page_is_asked_for_once_and_mapped_around_the_iteration(
    server: S3Server, fault: Fault, expected: type[BdnError], said: str, query: str, before: int
) -> None:
    server.fail(fault, query, times=None)
    seen = await seen_before(expected, said, opened(server, keys_of(server.account)))
    assert seen == FILES[:before]
    # aiohttp repeats a request once, without waiting, when the connection closed before an answer.
    assert server.log.count(query) <= (2 if fault == drop() else 1)


# Locating a large file of S3 asks for its head.
HEADS = [
    (answer(400), AuthRequiredError, r"a\.bin: status 400"),
    (answer(401), AuthRequiredError, "may not read it"),
    (answer(403), AuthRequiredError, "may not read it"),
    (answer(404), SourceChangedError, "it no longer exists"),
    (answer(405), SourceChangedError, "it no longer exists"),
    (answer(412), SourceChangedError, "its ETag changed"),
    (answer(418), SourceNotFoundError, "418"),
    (answer(429, {"Retry-After": "7"}), UpstreamRateLimitedError, "7 s"),
    (answer(503, {"Retry-After": "7"}), UpstreamRateLimitedError, "7 s"),
    (answer(500), UpstreamUnavailableError, "500"),
    (answer(502), UpstreamUnavailableError, "502"),
    (drop(), UpstreamUnavailableError, "did not answer"),
    (answer(200), UpstreamUnavailableError, "does not look like S3's"),
    (answer(200, {"ETag": '"another"'}), SourceChangedError, "its ETag changed"),
    (answer(200, {"ETag": '"listed"'}), SourceChangedError, f"its size was {LARGE.size} and is 16"),
]


@pytest.mark.parametrize(("fault", "expected", "said"), HEADS)
async def test_a_failing_head_is_asked_for_once_and_mapped(
    server: S3Server, fault: Fault, expected: type[BdnError], said: str
) -> None:
    server.fail(fault, times=None)
    async with opened(server, keys_of(server.account)) as source:
        with pytest.raises(expected, match=said) as raised:
            await source.locate(LARGE)
    assert "s3://failures" in str(raised.value)
    # aiohttp repeats a request once, without waiting, when the connection closed before an answer.
    assert server.log.count(method="HEAD") <= (2 if fault == drop() else 1)


async def test_slow_down_tells_how_long_to_wait_where_s3_says_so(server: S3Server) -> None:
    server.fail(error_answer(503, "SlowDown", {"Retry-After": "12"}))
    async with opened(server, keys_of(server.account)) as source:
        with pytest.raises(UpstreamRateLimitedError) as raised:
            await listed(source)
    assert raised.value.retry_after_seconds == 12


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with S3Server() as gone:
        pass
    async with opened(gone) as source:
        with pytest.raises(UpstreamUnavailableError, match="EndpointConnectionError"):
            await listed(source)


async def test_a_name_that_no_bucket_has_is_an_invalid_source(server: S3Server) -> None:
    async with opened(server, bucket="not a bucket") as source:
        with pytest.raises(InvalidSourceError, match="cannot have a bucket of this name"):
            await listed(source)


@pytest.mark.parametrize(("value", "said"), [
    ("AKIASESAME", "not a JSON object"),
    ('["AKIASESAME"]', "not a JSON object"),
    ("[" * 100_000, "not a JSON object"),
    ('{"aws_secret_access_key": "sesame"}', 'lacks the key "aws_access_key_id"'),
    ('{"aws_access_key_id": "AKIASESAME"}', 'lacks the key "aws_secret_access_key"'),
    ('{"accessKeyId": "AKIASESAME", "secretAccessKey": "sesame"}', 'lacks the key "aws_access_key_id"'),
    ('{"aws_access_key_id": "AKIASESAME", "aws_secret_access_key": ""}', 'lacks the key "aws_secret_access_key"'),
    ('{"aws_access_key_id": "AKIASESAME", "aws_secret_access_key": 7}', "aws_secret_access_key.* that is not a string"),
])  # fmt: skip
async def test_a_malformed_secret_names_the_missing_key_and_no_value(server: S3Server, value: str, said: str) -> None:
    with pytest.raises(SecretMalformedError, match=said) as raised:
        async with opened(server, value):
            pass
    assert "sesame" not in str(raised.value).lower()
    assert raised.value.__cause__ is raised.value.__context__ is None


async def test_ambient_credentials_count_only_where_they_are_allowed(server: S3Server) -> None:
    account = server.account
    ambient = S3Credentials(account.access_key_id, account.secret_access_key)
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url, s3_credentials=ambient)
    async with opened(server, ambient=True, settings=settings) as source:
        assert list(await listed(source)) == FILES
    async with opened(server, ambient=False, settings=settings) as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)


async def test_the_machine_s_own_aws_configuration_is_left_alone(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.account.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.account.secret_access_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://192.0.2.1")
    async with opened(server, bucket="failures-public") as source:
        assert set(await listed(source)) == {"a.txt"}
    async with opened(server) as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)
