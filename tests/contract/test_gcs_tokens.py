"""As whom GCS is read: how a service account's key becomes a token, each way to fail, and that no part of either is shown."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidRequestError,
    SecretMalformedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import BucketUri
from bdn.sources.gcs.tokens import AccessToken, key_tokens
from bdn.sources.opener import open_source
from bdn.sources.refreshing import Refreshing
from bdn.sources.sign_in import AwsAssumedRole, AwsRole, Secret, SourceContext, service_account_key
from tests.contract.opening import GcsWay, Opened
from tests.contract.source_contract import listed
from tests.doubles.faults import Fault, answer, drop
from tests.doubles.gcs import GcsServer
from tests.doubles.gcs_accounts import GoogleAccount
from tests.doubles.ranges import read_range
from tests.fakes.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def server(clock: Clock) -> Iterator[GcsServer]:
    with GcsServer(clock=clock) as server:
        server.bucket("private").put({"a.txt": b"x"})
        yield server


@pytest.fixture
def opened(server: GcsServer, clock: Clock) -> Opened:
    way = GcsWay.of(server)
    context = SourceContext("acme", way.settings, Secret("gcs-key", json.dumps(way.key)), clock=clock)
    return open_source(BucketUri("gs", "private", ""), context)


def tokens_of(server: GcsServer, clock: Clock, **changes: object) -> Refreshing[AccessToken]:
    key = server.account.key(server.token_url) | changes
    context = SourceContext("acme", GcsWay.of(server).settings, clock=clock)
    return key_tokens(Secret("gcs-key", json.dumps(key)), "gs://private", context)


async def test_the_short_form_of_a_key_is_accepted(server: GcsServer) -> None:
    async with GcsWay(server.url, server.token_url, server.account.short_key()).open("private") as source:
        assert set(await listed(source)) == {"a.txt"}


async def test_a_location_is_signed_anew_in_the_middle_of_a_long_copy(
    server: GcsServer, clock: Clock, opened: Opened
) -> None:
    async with opened as source:
        file = (await listed(source))["a.txt"]
        location = await source.locate(file)
        clock.now += 3601
        assert read_range(location, 0, 1).status == 401
        assert read_range(await source.locate(file), 0, 1).content == b"x"
        assert location.expires_at is not None
        assert location.expires_at < clock.now


async def test_a_listing_goes_on_with_a_new_token_where_the_old_one_ended(
    server: GcsServer, clock: Clock, opened: Opened
) -> None:
    server.bucket("private").put({f"{number}.txt": b"x" for number in range(9)})
    server.page_limit = 3
    seen = []
    async with opened as source:
        async for file in source.list(await source.resolve()):
            seen.append(file.path)
            clock.now += 1800
    assert len(seen) == 9
    assert server.log.count(origin="oauth") > 1


@pytest.mark.parametrize(("changes", "said"), [
    ({"private_key": GoogleAccount("other").pem}, "invalid_grant"),
    ({"private_key_id": "revoked"}, "invalid_grant"),
    ({"client_email": "nobody@double.iam.gserviceaccount.com"}, "invalid_grant"),
])  # fmt: skip
async def test_a_key_that_google_does_not_take_is_refused(
    server: GcsServer, clock: Clock, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(AuthRequiredError, match=said) as raised:
        await tokens_of(server, clock, **changes).get()
    shown = f"{raised.value}{raised.value!r}{raised.value.details()}"
    assert "PRIVATE KEY" not in shown
    assert "eyJ" not in shown
    assert server.log.count(origin="oauth") == 1


async def test_a_clock_that_is_wrong_is_named_as_a_cause(server: GcsServer, clock: Clock) -> None:
    server.tokens.skew_seconds = 7200
    with pytest.raises(AuthRequiredError, match="the clock of this machine is wrong"):
        await tokens_of(server, clock).get()


@pytest.mark.parametrize(("fault", "expected", "said"), [
    (answer(429, {"Retry-After": "7"}), UpstreamRateLimitedError, "7 s"),
    (answer(500), UpstreamUnavailableError, "answered 500"),
    (answer(503, {"Retry-After": "7"}), UpstreamUnavailableError, "answered 503"),
    (answer(401, body=b'{"error": "invalid_client"}'), AuthRequiredError, "invalid_client"),
    (answer(400, body=b'{"error": "<b>anything</b>"}'), AuthRequiredError, r"\(400: "),
    (answer(307, {"Location": "http://127.0.0.1:9/elsewhere"}), UpstreamUnavailableError, "answered 307"),
    (answer(200, body=b"<html>a proxy's page</html>"), UpstreamUnavailableError, "does not look like"),
    (answer(200, body=b"{}"), UpstreamUnavailableError, "does not look like"),
    (answer(200, body=b'{"access_token": "t"}'), UpstreamUnavailableError, "does not look like"),
    (answer(200, body=b'{"access_token": "t", "expires_in": "soon"}'), UpstreamUnavailableError, "does not look"),
    (drop(), UpstreamUnavailableError, "did not answer the request for a token"),
])  # fmt: skip
async def test_a_token_endpoint_that_fails_is_asked_once_and_mapped(
    server: GcsServer, clock: Clock, fault: Fault, expected: type[BdnError], said: str
) -> None:
    server.fail_tokens(fault, times=None)
    with pytest.raises(expected, match=said):
        await tokens_of(server, clock).get()
    assert server.log.count(origin="oauth") == 1


@pytest.mark.parametrize(("change", "said"), [
    ("sesame", "is not a JSON object"),
    ('["sesame"]', "is not a JSON object"),
    ({"client_email": None}, 'lacks the key "client_email"'),
    ({"private_key": ""}, 'lacks the key "private_key"'),
    ({"private_key_id": None}, 'lacks the key "private_key_id"'),
    ({"private_key": 7}, 'has the key "private_key" with a value that is not a string'),
    ({"private_key": "sesame"}, 'has a "private_key" that is not a private key in PEM form'),
    ({"type": "authorized_user"}, 'has a "type" other than "service_account"'),
    ({"token_uri": "http://sesame.example/token"}, 'has a "token_uri" that is not an https address'),
    ({"token_uri": "file:///etc/sesame"}, 'has a "token_uri" that is not an https address'),
])  # fmt: skip
async def test_a_malformed_key_is_named_by_its_missing_member_and_no_value(
    server: GcsServer, change: str | dict[str, object], said: str
) -> None:
    key: object = change if isinstance(change, str) else server.account.key(server.token_url) | change
    with pytest.raises(SecretMalformedError, match=said) as raised:
        async with GcsWay(server.url, server.token_url, key).open("private"):
            pass
    shown = f"{raised.value}{raised.value!r}"
    assert "sesame" not in shown
    assert "PRIVATE KEY" not in shown
    assert raised.value.__cause__ is None
    assert server.log.count() == 0


async def test_a_key_cannot_choose_another_universe_or_quota_project(server: GcsServer, clock: Clock) -> None:
    tokens = tokens_of(server, clock, universe_domain="evil.example", quota_project_id="another")
    assert server.tokens.owner_of((await tokens.get()).value) == server.account.email


async def test_a_role_of_aws_opens_no_bucket_of_google(server: GcsServer) -> None:
    role = AwsAssumedRole(AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "bdn"), "external")
    context = SourceContext("acme", GcsWay.of(server).settings, role)
    with pytest.raises(InvalidRequestError, match="role of AWS"):
        async with open_source(BucketUri("gs", "private", ""), context):
            pass


async def test_no_repr_shows_a_token_or_a_key(server: GcsServer, clock: Clock) -> None:
    tokens = tokens_of(server, clock)
    token = await tokens.get()
    key = service_account_key(Secret("gcs-key", json.dumps(server.account.key(server.token_url))))
    shown = repr((token, key, tokens))
    assert token.value not in shown
    assert "PRIVATE KEY" not in shown
    assert key.client_email in shown


# --- what of the machine's own Google credentials counts ---


async def test_the_operator_s_own_key_counts_only_where_it_is_allowed(server: GcsServer, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(server.account.key(server.token_url)))
    way = GcsWay(server.url, server.token_url, key_file=str(file), ambient=True)
    async with way.open("private") as source:
        assert set(await listed(source)) == {"a.txt"}
    async with replace(way, ambient=False).open("private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)
    async with replace(way, key=server.stranger.key(server.token_url)).open("private") as source:
        with pytest.raises(AuthRequiredError, match="403"):
            await listed(source)


async def test_a_key_file_that_cannot_be_read_is_named_by_its_variable(server: GcsServer, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        way = GcsWay(server.url, key_file=str(tmp_path / name), ambient=True)
        with pytest.raises(SecretMalformedError, match="'GOOGLE_APPLICATION_CREDENTIALS' names a file"):
            async with way.open("private"):
                pass


async def test_the_machine_s_own_google_login_is_left_alone(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(server.account.key(server.token_url)))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://192.0.2.1")
    monkeypatch.setenv("GOOGLE_API_USE_CLIENT_CERTIFICATE", "true")
    monkeypatch.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "evil.example")
    async with GcsWay(server.url).open("private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)


async def test_the_operator_s_netrc_is_sent_nowhere(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login operator password sesame\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with GcsWay.of(server).open("private") as source:
        assert set(await listed(source)) == {"a.txt"}
    async with GcsWay(server.url).open("private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)
    sent = [request.headers.get("authorization", "") for request in server.log.find()]
    assert len(sent) == 3
    assert not any(header.startswith("Basic") for header in sent)
