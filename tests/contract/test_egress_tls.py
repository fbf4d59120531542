"""Behind the egress guard a connection goes to an address, and its certificate is still that of the name."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress

import aiohttp
import pytest
from huggingface_hub import close_session

from bdn.core.chunk import ByteRange
from bdn.core.errors import UpstreamUnavailableError
from bdn.core.source.upstream import Location
from bdn.core.source.uri import parse_source
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.guarded_connector import guarded_connector
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.support.network.authority import Authority, new_authority
from tests.support.network.egress import LOOPBACK
from tests.support.network.egress_streets import Names
from tests.support.network.raw_server import RawServer, message, read_head
from tests.support.network.tunnels import over_tls

Ask = Callable[[str, Authority], Awaitable[None]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "hub.example")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> Iterator[None]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))
    close_session()
    yield
    close_session()


async def by_ranges(url: str, _: Authority) -> None:
    with closing(ConnectionPool(timeout_seconds=10, egress=LOOPBACK)) as connections:
        request = RangeRequest("s3://bucket", "file", ByteRange(0, 1), 1)
        await asyncio.to_thread(RangedReader(connections).read_into, Location(url), request, memoryview(bytearray(1)))


async def by_hub(url: str, _: Authority) -> None:
    await survey("hf://org/model", UpstreamSettings(hf_endpoint=url, egress=LOOPBACK))


async def by_s3(url: str, authority: Authority) -> None:
    bundle = str(authority.certificates)
    await survey("s3://bucket", UpstreamSettings(s3_endpoint_url=url, egress=LOOPBACK, ca_bundle=bundle))


async def by_aiohttp(url: str, authority: Authority) -> None:
    tls = ssl.create_default_context(cafile=str(authority.certificates))
    async with (
        aiohttp.ClientSession(connector=guarded_connector(LOOPBACK, ssl=tls)) as session,
        session.get(url) as response,
    ):
        response.raise_for_status()


async def survey(uri: str, settings: UpstreamSettings) -> None:
    async with open_source(
        parse_source(uri), sign_in=None, organisation="acme", ambient_credentials=False, settings=settings
    ) as source:
        async for _ in source.list(await source.resolve()):
            pass


@pytest.mark.parametrize("ask", [by_ranges, by_hub, by_s3, by_aiohttp])
@pytest.mark.parametrize("name", ["hub.example", "other.example"])
async def test_the_name_is_what_the_certificate_has_to_be_for(
    ask: Ask, name: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    def play(connection: socket.socket) -> None:
        heads.append(read_head(connection))
        connection.sendall(message("404 Not Found", "Content-Length: 0", "Connection: close"))

    names = Names(monkeypatch)
    names.say(name, ["127.0.0.1"])
    with RawServer(*[over_tls(authority.server, play)] * 4) as server:
        port = server.url.rpartition(":")[2]
        with suppress(Exception):
            await ask(f"https://{name}:{port}", authority)
    assert (len(heads) >= 1) is (name == "hub.example")
    for head in heads:
        assert f"host: hub.example:{port}" in head.decode().lower()


async def test_a_certificate_for_another_name_is_an_unavailable_upstream(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch).say("other.example", ["127.0.0.1"])
    with (
        RawServer(over_tls(authority.server, lambda _: None)) as server,
        pytest.raises(UpstreamUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        await by_hub(f"https://other.example:{server.url.rpartition(':')[2]}", authority)
