"""The egress guard at each way out of the mirror, with the real clients."""

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress

import aiohttp
import pytest
from huggingface_hub import close_session

from bdn.core.chunk import ByteRange
from bdn.core.egress import EgressPolicy
from bdn.core.errors import EgressRefusedError, UpstreamUnavailableError
from bdn.core.source.upstream import Location
from bdn.core.source.uri import parse_source
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.gcs.tokens import key_tokens, service_account_tokens
from bdn.sources.guarded_connector import guarded_connector
from bdn.sources.opener import open_source
from bdn.sources.s3.credentials import role_credentials
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Assertion, AwsRole, AwsWebIdentity, GoogleServiceAccount, Secret, SourceContext
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.contract.egress_contract import Door, EgressContract, FollowingEgressContract
from tests.doubles.gcs_accounts import GoogleAccount
from tests.support.network.authority import Authority, new_authority
from tests.support.network.egress import LOOPBACK
from tests.support.network.egress_streets import Names
from tests.support.network.raw_server import RawServer, message, read_head
from tests.support.network.tunnels import over_tls

ASSERTION = Assertion(lambda _: "token", "https://mirror.example", "org:acme:*")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """Proxies and authorities of a hub's session are those of the environment in which it is made."""
    close_session()
    yield
    close_session()


async def survey(uri: str, settings: UpstreamSettings) -> None:
    """All that a source is asked before bytes are read."""
    async with open_source(parse_source(uri), SourceContext("acme", settings)) as source:
        async for _ in source.list(await source.resolve()):
            pass


async def by_ranges(url: str, policy: EgressPolicy) -> None:
    with closing(ConnectionPool(timeout_seconds=10, egress=policy)) as connections:
        request = RangeRequest("s3://bucket", "file", ByteRange(0, 1), 1)
        reader = RangedReader(connections)
        await asyncio.to_thread(reader.read_into, Location(f"{url}/file"), request, memoryview(bytearray(1)))


async def by_hub(url: str, policy: EgressPolicy) -> None:
    close_session()
    await survey("hf://org/model", UpstreamSettings(hf_endpoint=url, egress=policy))


async def by_s3(url: str, policy: EgressPolicy) -> None:
    await survey("s3://bucket", UpstreamSettings(s3_endpoint_url=url, egress=policy))


async def by_gcs(url: str, policy: EgressPolicy) -> None:
    await survey("gs://bucket", UpstreamSettings(gcs_endpoint_url=url, egress=policy))


async def by_sts(url: str, policy: EgressPolicy) -> None:
    role = AwsWebIdentity(AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "bdn"), ASSERTION)
    context = SourceContext("acme", UpstreamSettings(sts_endpoint_url=url, egress=policy))
    await role_credentials(role, "s3://bucket", context).get()


async def by_google_sts(url: str, policy: EgressPolicy) -> None:
    provider = "projects/1/locations/global/workloadIdentityPools/pool/providers/mirror"
    account = GoogleServiceAccount("reader@project.iam.gserviceaccount.com", provider, ASSERTION)
    context = SourceContext("acme", UpstreamSettings(google_sts_url=url, egress=policy))
    await service_account_tokens(account, "gs://bucket", context).get()


async def by_key_of_a_service_account(url: str, policy: EgressPolicy) -> None:
    secret = Secret("key", json.dumps(GoogleAccount("egress").short_key()))
    context = SourceContext("acme", UpstreamSettings(google_token_url=url, egress=policy))
    await key_tokens(secret, "gs://bucket", context).get()


async def by_aiohttp(url: str, policy: EgressPolicy) -> None:
    """Whatever else asks through aiohttp, redirects included."""
    connector = guarded_connector(policy, ssl=ssl.create_default_context())
    async with (
        aiohttp.ClientSession(connector=connector, trust_env=True, raise_for_status=True) as session,
        session.get(url),
    ):
        pass


class TestRanges(EgressContract):
    @pytest.fixture
    def door(self) -> Door:
        return by_ranges


class TestDoorsWithoutRedirects(EgressContract):
    follows_redirects = False

    @pytest.fixture(params=[by_s3, by_gcs, by_sts, by_google_sts, by_key_of_a_service_account])
    def door(self, request: pytest.FixtureRequest) -> Door:
        door: Door = request.param
        return door

    async def test_the_address_in_a_users_secret_is_judged(self, attempts: list[str]) -> None:
        key = GoogleAccount("egress").key("https://169.254.169.254/computeMetadata/v1/token")
        context = SourceContext("acme", UpstreamSettings())
        with pytest.raises(EgressRefusedError, match="metadata"):
            await key_tokens(Secret("key", json.dumps(key)), "gs://bucket", context).get()
        assert not attempts


class TestDoorsThatFollow(FollowingEgressContract):
    @pytest.fixture(params=[by_hub, by_aiohttp])
    def door(self, request: pytest.FixtureRequest) -> Door:
        door: Door = request.param
        return door


# --- a connection goes to an address, and its certificate is still that of the name ---


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "hub.example")


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> Authority:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))
    return authority


async def by_s3_with_a_bundle(url: str, policy: EgressPolicy) -> None:
    bundle = ssl.get_default_verify_paths().cafile
    await survey("s3://bucket", UpstreamSettings(s3_endpoint_url=url, egress=policy, ca_bundle=bundle))


@pytest.mark.parametrize("door", [by_ranges, by_hub, by_s3_with_a_bundle, by_aiohttp])
@pytest.mark.parametrize("name", ["hub.example", "other.example"])
async def test_the_name_is_what_the_certificate_has_to_be_for(
    door: Door, name: str, trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    def play(connection: socket.socket) -> None:
        heads.append(read_head(connection))
        connection.sendall(message("404 Not Found", "Content-Length: 0", "Connection: close"))

    Names(monkeypatch).say(name, ["127.0.0.1"])
    with RawServer(*[over_tls(trusted.server, play)] * 4) as server:
        port = server.url.rpartition(":")[2]
        with suppress(Exception):
            await door(f"https://{name}:{port}", LOOPBACK)
    assert (len(heads) >= 1) is (name == "hub.example")
    for head in heads:
        assert f"host: hub.example:{port}" in head.decode().lower()


async def test_a_certificate_for_another_name_is_an_unavailable_upstream(
    trusted: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch).say("other.example", ["127.0.0.1"])
    with (
        RawServer(over_tls(trusted.server, lambda _: None)) as server,
        pytest.raises(UpstreamUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        await by_hub(f"https://other.example:{server.url.rpartition(':')[2]}", LOOPBACK)
