"""The forwarder: which requests reach the service, how they look there, and which ways the environment's proxies open."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from bdn.core.errors import BdnError
from bdn.net.forwarder import Forwarder
from bdn.net.tls import Authorities
from tests.support.network.authority import new_authority
from tests.support.network.ports import free_port
from tests.support.network.raw_server import DONE, RawServer, answering, message, read_head
from tests.support.network.tunnels import ConnectProxy, over_tls

NAMES = ("localhost:8000", "api.localhost:8000")
SECRET = {"Authorization": "Bearer TOKEN"}


@asynccontextmanager
async def client_of(forwarder: Forwarder) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        forwarder.listening() as proxy,
        httpx2.AsyncClient(proxy=proxy, trust_env=False, verify=False, timeout=60) as client,
    ):
        yield client


class Recording:
    """Answers each connection and keeps the heads of the requests."""

    def __init__(self, answer: bytes = DONE, connections: int = 1) -> None:
        self.heads: list[str] = []
        self._answer = answer
        self.server = RawServer(*[self.play] * connections)

    def play(self, connection: socket.socket) -> None:
        self.heads.append(read_head(connection).decode())
        connection.sendall(self._answer)

    @property
    def head(self) -> list[str]:
        """The lines of the only request."""
        (only,) = self.heads
        return only.split("\r\n")


async def test_names_of_the_service__reach_it_in_origin_form_with_its_own_host() -> None:
    for name in (*NAMES, "API.localhost:8000"):
        there = Recording()
        with there.server as server:
            forwarder = Forwarder(f"{server.url}/below/", NAMES, {"BDN-Organisation": "acme"})
            async with client_of(forwarder) as client:
                forged = {**SECRET, "BDN-Forwarded-Host": "elsewhere"}
                answer = await client.get(f"http://{name}/v1/a%20b?x=1&y=", headers=forged)
        assert (answer.status_code, answer.text) == (200, "ok")
        assert there.head[0] == "GET /below/v1/a%20b?x=1&y= HTTP/1.1"
        assert {
            f"host: {urlsplit(server.url).netloc}",
            f"bdn-forwarded-host: {name.lower()}",
            "bdn-organisation: acme",
            "authorization: Bearer TOKEN",
            "connection: close",
        } <= set(there.head)
        assert not [line for line in there.head if line.startswith("proxy-")]


async def test_other_names__are_answered_by_their_own_hosts() -> None:
    there = Recording()
    with there.server as server:
        async with client_of(Forwarder("http://localhost:1", NAMES, {"BDN-Organisation": "acme"})) as client:
            assert (await client.get(f"{server.url}/files/x?sig=y")).text == "ok"
    assert there.head[0] == "GET /files/x?sig=y HTTP/1.1"
    assert not [line for line in there.head if line.startswith("bdn-")]


async def test_other_names__go_through_the_proxy_of_the_environment_but_for_its_exceptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Recording(connections=2)
    with there.server as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:p%40ss@"))
        monkeypatch.setenv("NO_PROXY", "inside.invalid")
        async with client_of(Forwarder("http://mirror.example", NAMES)) as client:
            assert (await client.get("http://elsewhere.example/x?y")).text == "ok"
            assert (await client.get("http://localhost:8000/v1/teams")).text == "ok"
            assert (await client.get("http://inside.invalid/x")).status_code == 502  # asked directly, and unknown
    assert [head.split("\r\n")[0] for head in there.heads] == [
        "GET http://elsewhere.example/x?y HTTP/1.1",
        "GET http://mirror.example/v1/teams HTTP/1.1",
    ]
    credentials = f"Proxy-Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}"
    assert all(credentials in head.split("\r\n") for head in there.heads)


async def test_a_service_with_tls__is_verified_and_reached_also_through_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = new_authority(tmp_path, "mirror.example", "localhost")
    play = over_tls(authority.server, answering(DONE))
    with RawServer(play, play) as server:
        port = urlsplit(server.url).port or 0
        trusting = Authorities(authority.certificates)
        async with client_of(Forwarder(f"https://localhost:{port}", NAMES, authorities=trusting)) as client:
            assert (await client.get("http://localhost:8000/x", headers=SECRET)).text == "ok"
        with ConnectProxy(("127.0.0.1", port)) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            async with client_of(Forwarder("https://mirror.example", NAMES, authorities=trusting)) as client:
                assert (await client.get("http://localhost:8000/x", headers=SECRET)).text == "ok"
    assert proxy.asked_for == ["mirror.example:443"]
    assert "TOKEN" not in "".join(proxy.heads)


async def test_a_service_that_cannot_be_reached_or_trusted__is_a_502_and_told(tmp_path: Path) -> None:
    authority = new_authority(tmp_path, "localhost")
    with RawServer(over_tls(authority.server, answering(DONE))) as untrusted:
        port = urlsplit(untrusted.url).port
        for url, words in (
            (f"http://localhost:{free_port()}", "bdn up"),
            (f"https://localhost:{port}", "BDN_TLS_CA"),
        ):
            told: list[BdnError] = []
            async with client_of(Forwarder(url, NAMES, on_error=told.append)) as client:
                answer = await client.get("http://localhost:8000/v1/teams")
            assert answer.status_code == 502
            assert answer.json()["message"] == answer.json()["error"]["message"] == str(told[0])
            assert words in str(told[0])
            assert len(told) == 1


async def test_what_is_not_a_request_to_a_proxy__is_refused() -> None:
    async with Forwarder("http://localhost:1", NAMES).listening() as proxy:
        async with httpx2.AsyncClient(base_url=proxy, trust_env=False) as client:
            answer = await client.get("/v1/teams")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST")
        async with httpx2.AsyncClient(proxy=proxy, trust_env=False, verify=False) as client:
            with pytest.raises(httpx2.ProxyError, match="400"):
                await client.get("https://localhost:8000/")


async def test_a_body__is_passed_on_as_it_comes_and_an_early_answer_returned() -> None:
    sizes: list[int] = []
    full = b"x" * 3_000_000

    def taking(connection: socket.socket) -> None:
        head, came = read_head(connection), 0
        assert b"\r\nexpect: 100-continue\r\n" in head
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while came < len(full):
            came += len(connection.recv(1 << 16))
        sizes.append(came)
        connection.sendall(DONE)

    def refusing(connection: socket.socket) -> None:
        read_head(connection)
        connection.sendall(message("403 Forbidden", "Content-Length: 2", "Connection: close", body=b"no"))
        while connection.recv(1 << 16):
            pass

    with RawServer(taking, refusing) as server:
        async with client_of(Forwarder(server.url, NAMES)) as client:
            url = "http://api.localhost:8000/uploads/x"
            done = await client.put(url, content=full, headers={"Expect": "100-continue"})
            assert (done.text, done.headers["connection"]) == ("ok", "close")  # though the host said nothing of it
            assert (await client.put(url, content=full)).status_code == 403
    assert sizes == [len(full)]


async def test_a_client_that_leaves__ends_its_request() -> None:
    ended: list[bytes] = []

    def waiting(connection: socket.socket) -> None:
        read_head(connection)
        ended.append(connection.recv(1))

    with RawServer(waiting) as server:
        async with Forwarder(server.url, NAMES).listening() as proxy:
            with socket.create_connection(("127.0.0.1", urlsplit(proxy).port or 0)) as client:
                client.sendall(b"GET http://localhost:8000/x HTTP/1.1\r\nHost: x\r\n\r\n")
                client.setblocking(False)
            assert await asyncio.to_thread(server.closed[0].wait, 60)
    assert ended == [b""]


async def test_a_proxy_that_cannot_be_used__is_refused_by_name_where_it_would_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1080")
    with RawServer(answering(DONE)) as server:
        async with client_of(Forwarder(server.url, NAMES)) as client:
            assert (await client.get("http://localhost:8000/x")).text == "ok"
            refused = await client.get("http://elsewhere.example/x")
    assert refused.status_code == 502
    assert "ALL_PROXY" in refused.json()["message"]
