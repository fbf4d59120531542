"""The egress guard at each way out of the mirror, with the real clients: nothing is sent to a refused address."""

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress

import aiohttp
import pytest
from huggingface_hub import close_session

from bdn.core.chunk import ByteRange
from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import EgressRefusedError
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
from tests.doubles.gcs_accounts import GoogleAccount
from tests.doubles.http_origin import Answer, Origin
from tests.support.network.authority import Authority, new_authority
from tests.support.network.egress import LOOPBACK
from tests.support.network.egress_streets import Doorbell, Names, note_attempts
from tests.support.network.raw_server import RawServer, message, read_head
from tests.support.network.tunnels import ConnectProxy, over_tls

ONE_ADDRESS = EgressPolicy.parse("127.0.0.1")
Door = Callable[[str, EgressPolicy], Awaitable[None]]  # sends a GET, or what it does first; it may fail in any way
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


async def by_requests(url: str, policy: EgressPolicy) -> None:
    """Of sources without a client library, redirects included."""
    await survey("azure://account/container", UpstreamSettings(azure_endpoint_url=url, egress=policy))


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


FOLLOWING = (by_hub, by_aiohttp)  # they follow redirects themselves, and take plain http to a proxy
DOORS = (by_ranges, by_requests, by_s3, by_gcs, by_sts, by_google_sts, by_key_of_a_service_account, *FOLLOWING)
every_door = pytest.mark.parametrize("door", DOORS)

WRITTEN = (
    "127.0.0.1", "127.0.0.2", "127.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.1.", "0.0.0.0", "10.0.0.1",
    "100.64.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "localhost", "LOCALHOST", "[::1]", "[::]",
    "[fc00::1]", "[fe80::1]", "[::ffff:10.0.0.1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
)  # fmt: skip
READ_IN_MANY_WAYS = ("①②⑦.⓪.⓪.①", "127。0。0。1", "127%2e0%2e0%2e1", "[fe80::1%25eth0]")
RESOLVED = (
    ["127.0.0.2"], ["10.0.0.5"], ["169.254.169.254"], ["::1"], ["fd00:ec2::254"], ["::ffff:10.0.0.1"],
    ["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"], ["8.8.8.8", "10.0.0.5"],
)  # fmt: skip


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_attempts(monkeypatch)


@pytest.fixture
def answers() -> list[Answer]:
    """What the allowed server answers, one after the other, the last one for ever; nothing useful at first."""
    return [Answer(404)]


@pytest.fixture
def allowed(answers: list[Answer]) -> Iterator[Origin]:
    """A server on 127.0.0.1."""
    with Origin("allowed", lambda _: answers.pop(0) if len(answers) > 1 else answers[0]) as origin:
        yield origin


@every_door
async def test_a_special_address_is_refused_in_every_spelling(door: Door, names: Names, attempts: list[str]) -> None:
    for host in WRITTEN:
        with pytest.raises(EgressRefusedError, match="BDN_EGRESS_ALLOW"):
            await door(f"http://{host}:9", PUBLIC_INTERNET)
        assert (attempts, names.asked) == ([], []), host


@every_door
async def test_a_spelling_that_clients_read_in_their_own_ways_gets_nowhere(
    door: Door, names: Names, attempts: list[str]
) -> None:
    for host in READ_IN_MANY_WAYS:
        with pytest.raises(Exception):  # noqa: B017 - most clients refuse to send it themselves
            await door(f"http://{host}:9", PUBLIC_INTERNET)
        assert not attempts, host


@every_door
async def test_a_name_is_refused_when_one_of_its_addresses_is(door: Door, names: Names, attempts: list[str]) -> None:
    for addresses in RESOLVED:
        names.say("hub.example", addresses)
        with pytest.raises(EgressRefusedError, match=r"hub\.example may not be contacted: it resolves to"):
            await door("http://hub.example:9", ONE_ADDRESS)
        assert not attempts, addresses


@every_door
async def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
    door: Door, names: Names, attempts: list[str], allowed: Origin
) -> None:
    """DNS rebinding: whoever asks again gets another answer."""
    names.say("hub.example", ["127.0.0.1"], ["127.0.0.2"])
    port = int(allowed.url.rpartition(":")[2])
    with Doorbell("127.0.0.2", port) as forbidden:
        with suppress(Exception):
            await door(f"http://hub.example:{port}", ONE_ADDRESS)
        assert not forbidden.rang
    assert allowed.log.count() >= 1
    assert set(attempts) == {"127.0.0.1"}


@every_door
async def test_what_the_operator_allows_is_contacted(door: Door, names: Names, allowed: Origin) -> None:
    names.say("hub.example", ["127.0.0.1"])
    for allow in ("hub.example", "*.example", "127.0.0.0/30"):
        allowed.log.clear()
        with suppress(Exception):
            await door(allowed.url.replace("127.0.0.1", "hub.example"), EgressPolicy.parse(allow))
        assert allowed.log.count() >= 1, allow


@every_door
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_to_a_refused_address_is_not_followed(
    door: Door, names: Names, attempts: list[str], allowed: Origin, answers: list[Answer], status: int
) -> None:
    names.say("hub.example", ["127.0.0.2"])
    expected = EgressRefusedError if door in (by_ranges, by_requests, by_gcs, *FOLLOWING) else Exception
    with Doorbell("127.0.0.2") as forbidden:  # no test allows it
        for host in ("127.0.0.2", "2130706434", "hub.example", "[::ffff:127.0.0.2]"):
            answers[:] = [Answer(status, {"Location": f"http://{host}:{forbidden.port}/secrets"})]
            allowed.log.clear()
            with pytest.raises(expected):
                await door(allowed.url, ONE_ADDRESS)
            assert allowed.log.count() >= 1, host
            assert not forbidden.rang, host
    assert set(attempts) == {"127.0.0.1"}


def closed_proxy(connections: int) -> ConnectProxy:
    refusal = message("403 Forbidden", "Content-Length: 0", "Connection: close")
    return ConnectProxy(("127.0.0.1", 9), refuse=refusal, connections=connections)


@every_door
async def test_behind_a_proxy_addresses_are_judged_as_written_and_names_are_the_proxys(
    door: Door, names: Names, attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_proxy(8) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        for host in ("169.254.169.254", "localhost", "0x7f.1", "[::ffff:10.0.0.1]"):
            with pytest.raises(EgressRefusedError):
                await door(f"https://{host}", PUBLIC_INTERNET)
        assert not attempts
        names.say("hub.example", ["127.0.0.2"])  # the proxy's own resolver may know better
        with pytest.raises(Exception) as raised:
            await door("https://hub.example", PUBLIC_INTERNET)
        assert not isinstance(raised.value, EgressRefusedError)
        assert set(proxy.asked_for) == {"hub.example:443"}
        assert not names.asked


@every_door
async def test_a_proxy_may_be_a_private_host(door: Door, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator named it, and nobody else can."""
    with closed_proxy(2) as proxy:
        names.say("proxy.corp", ["127.0.0.1"])
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("127.0.0.1", "proxy.corp"))
        with pytest.raises(Exception) as raised:
            await door("https://hub.example", PUBLIC_INTERNET)
        assert not isinstance(raised.value, EgressRefusedError)
        assert set(proxy.asked_for) == {"hub.example:443"}


@pytest.mark.parametrize("door", FOLLOWING)
async def test_a_redirect_behind_a_proxy_is_judged_too(
    door: Door, names: Names, allowed: Origin, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers[:] = [Answer(302, {"Location": "http://169.254.169.254/latest/meta-data/"}), Answer(404)]
    monkeypatch.setenv("HTTP_PROXY", allowed.url)
    with pytest.raises(EgressRefusedError, match="169"):
        await door("http://hub.example", PUBLIC_INTERNET)
    assert [request.target.startswith("http://hub.example") for request in allowed.log.find()] == [True]
    assert not names.asked


async def test_the_address_in_a_users_secret_is_judged(attempts: list[str]) -> None:
    key = GoogleAccount("egress").key("https://169.254.169.254/computeMetadata/v1/token")
    with pytest.raises(EgressRefusedError, match="metadata"):
        await key_tokens(Secret("key", json.dumps(key)), "gs://bucket", SourceContext("acme", UpstreamSettings())).get()
    assert not attempts


# --- a connection goes to an address, and its certificate is still that of the name ---


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "hub.example")


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> Authority:
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
