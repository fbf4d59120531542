"""https is verified against the operator's authorities, and goes through HTTPS_PROXY unless NO_PROXY says otherwise."""

import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import UpstreamUnavailableError
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool
from bdn.net.unreachable import UpstreamUntrustedError
from bdn.transfer.ranged import RangedReader
from tests.support.network.authority import Authority, new_authority
from tests.support.network.raw_server import RawServer, answering, message, partial, taking, waiting_after
from tests.support.network.tunnels import ConnectProxy, over_tls
from tests.support.network.upstream import CONTENT, SIZE, read_range

GOOD = partial(CONTENT[:10], 0, SIZE)
WEIGHTS = "https://weights.example/file"  # a name that only the proxy can resolve


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "weights.example", "localhost")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))


@pytest.fixture
def reader() -> Iterator[RangedReader]:
    with closing(ConnectionPool(timeout_seconds=10)) as pool:
        yield RangedReader(pool)


def tls_server(authority: Authority, *answers: bytes) -> RawServer:
    return RawServer(over_tls(authority.server, answering(*answers)))


def address_of(server: RawServer) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return "127.0.0.1", parts.port or 0


def local_url(server: RawServer) -> str:
    return f"https://localhost:{address_of(server)[1]}/file"


@pytest.fixture
def proxied(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    """A server with two answers behind a proxy that is named in the environment."""
    with tls_server(authority, GOOD, GOOD) as server, ConnectProxy(address_of(server)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        yield proxy


def test_a_server_that_the_operators_authority_vouches_for_is_read(reader: RangedReader, authority: Authority) -> None:
    with tls_server(authority, GOOD, GOOD) as server:
        for _ in range(2):
            assert read_range(reader, Location(local_url(server)), 0, 10) == CONTENT[:10]
        assert server.connections == 1


@pytest.mark.parametrize(("host", "words"), [
    ("localhost", "CERTIFICATE_VERIFY_FAILED"), ("127.0.0.1", r"not valid for '127\.0\.0\.1'"),
])  # fmt: skip
def test_a_server_that_nobody_vouches_for_or_that_is_another_one_is_refused(
    reader: RangedReader, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, words: str
) -> None:
    if host == "localhost":  # which another authority vouches for
        monkeypatch.setenv("SSL_CERT_FILE", str(new_authority(tmp_path, "localhost").certificates))
    with tls_server(authority, GOOD) as server, pytest.raises(UpstreamUntrustedError, match=words) as raised:
        read_range(reader, Location(local_url(server).replace("localhost", host)), 0, 10)
    assert (raised.value.code, raised.value.transient) == ("UPSTREAM_UNAVAILABLE", False)


def test_an_idle_tls_connection_that_the_server_closed_is_replaced(reader: RangedReader, authority: Authority) -> None:
    play = over_tls(authority.server, answering(GOOD))
    with RawServer(play, play) as server:
        read_range(reader, Location(local_url(server)), 0, 10)
        server.closed[0].wait(60)
        assert read_range(reader, Location(local_url(server)), 0, 10) == CONTENT[:10]


def test_a_body_that_is_broken_off_by_closing_never_turns_into_ciphertext(authority: Authority) -> None:
    """What had arrived is read on as it was sent, or not at all: the records behind it are no data."""
    body = bytes(range(256)) * 512
    answer = message("200 OK", f"Content-Length: {2 * len(body)}", body=body)
    with (
        closing(ConnectionPool(timeout_seconds=10)) as pool,
        tls_server(authority, answer) as server,
        pool.get(local_url(server), {}) as response,
    ):
        received = response.read(10)
        assert server.closed[0].wait(60)  # everything is on its way
        pool.close()
        with suppress(*NETWORK_ERRORS):
            while piece := response.read(1000):
                received += piece
    assert body.startswith(received)


def test_https_goes_through_the_proxy_encrypted_to_the_end(reader: RangedReader, proxied: ConnectProxy) -> None:
    for _ in range(2):
        assert read_range(reader, Location(WEIGHTS, (("Authorization", "Bearer secret"),)), 0, 10) == CONTENT[:10]
    assert proxied.asked_for == ["weights.example:443"]  # and the tunnel is kept like a connection
    assert "secret" not in "".join(proxied.heads)
    assert "Proxy-Authorization" not in proxied.heads[0]


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
@pytest.mark.parametrize("form", ["http://{}/", "{}", "http://me:p%40ss@{}"])
def test_a_proxy_may_be_named_in_any_usual_form_and_gets_its_credentials(
    reader: RangedReader, proxied: ConnectProxy, monkeypatch: pytest.MonkeyPatch, variable: str, form: str
) -> None:
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv(variable, form.format(urlsplit(proxied.url).netloc))
    assert read_range(reader, Location(WEIGHTS), 0, 10) == CONTENT[:10]
    credentials = f"Proxy-Authorization: Basic {base64.b64encode(b'me:p@ss').decode()}\r\n"
    assert (credentials in proxied.heads[0]) is ("@" in form)


@pytest.mark.parametrize(("answer", "words"), [
    (message("407 Proxy Authentication Required", "Content-Length: 0"), "407 Proxy Authentication Required"),
    (message("200 Connection established", body=b"\x16\x03"), "into the tunnel before the host"),
])  # fmt: skip
def test_a_proxy_that_refuses_or_speaks_too_early_is_an_error_that_may_pass(
    reader: RangedReader, monkeypatch: pytest.MonkeyPatch, answer: bytes, words: str
) -> None:
    with ConnectProxy(("127.0.0.1", 9), refuse=answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(UpstreamUnavailableError, match=words):
            read_range(reader, Location(WEIGHTS), 0, 10)


def test_a_proxy_over_https_is_refused_and_not_spoken_to_in_the_clear(
    reader: RangedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawServer(answering(GOOD)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("http:", "https:"))
        with pytest.raises(UpstreamUnavailableError, match="HTTPS_PROXY must be an http:// address"):
            read_range(reader, Location(WEIGHTS), 0, 10)
        assert proxy.connections == 0


def test_a_redirect_from_https_to_http_is_refused(reader: RangedReader, authority: Authority) -> None:
    """With credentials and without: what comes in the clear may be anybody's."""
    with RawServer(answering(GOOD)) as clear:
        away = message("302 Found", f"Location: {clear.url}/x?Signature=5igned", "Content-Length: 0")
        with tls_server(authority, away) as server, pytest.raises(UpstreamUntrustedError, match="from https to http"):
            read_range(reader, Location(local_url(server)), 0, 10)
        assert clear.connections == 0


def test_a_redirect_from_http_to_https_is_followed(reader: RangedReader, authority: Authority) -> None:
    with tls_server(authority, GOOD) as server:
        away = message("302 Found", f"Location: {local_url(server)}", "Content-Length: 0")
        with RawServer(answering(away)) as clear:
            assert read_range(reader, Location(clear.url), 0, 10) == CONTENT[:10]


def test_a_tls_body_that_stalls_is_gone_on_with(authority: Authority) -> None:
    begun = partial(CONTENT[:1000], 0, SIZE)[:-900]
    plays = [waiting_after(begun), answering(partial(CONTENT[100:1000], 100, SIZE))]
    with (
        closing(ConnectionPool(timeout_seconds=10)) as pool,
        RawServer(*(over_tls(authority.server, play) for play in plays)) as server,
    ):
        reader = RangedReader(pool, stall=StallPolicy(200, 0.03))
        assert read_range(reader, Location(local_url(server)), 0, 1000) == CONTENT[:1000]


@pytest.mark.parametrize("exceptions", ["localhost", "example.org,localhost", "*"])
def test_no_proxy_names_hosts_that_are_asked_directly(
    reader: RangedReader, authority: Authority, proxied: ConnectProxy, monkeypatch: pytest.MonkeyPatch, exceptions: str
) -> None:
    monkeypatch.setenv("NO_PROXY", exceptions)
    with tls_server(authority, GOOD) as server:
        assert read_range(reader, Location(local_url(server)), 0, 10) == CONTENT[:10]
        assert (proxied.connections, server.connections) == (0, 1)


def test_plain_http_does_not_go_through_the_proxy_for_https(reader: RangedReader, proxied: ConnectProxy) -> None:
    with RawServer(answering(GOOD)) as server:
        assert read_range(reader, Location(server.url), 0, 10) == CONTENT[:10]
        assert proxied.connections == 0


def test_a_body_goes_out_in_pieces_each_with_the_time_of_the_request(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS a timeout bounds a whole write; the body that was read before had a shorter one."""
    pieces: list[tuple[int, float | None]] = []
    send_all = ssl.SSLSocket.sendall

    def record(connection: ssl.SSLSocket, content: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():
            pieces.append((len(content), connection.gettimeout()))
        send_all(connection, content)

    monkeypatch.setattr(ssl.SSLSocket, "sendall", record)
    body = bytes(range(256)) * 4096
    with (
        RawServer(over_tls(authority.server, taking(b"", body))) as server,
        closing(ConnectionPool(timeout_seconds=10)) as pool,
    ):
        url = local_url(server)
        for content in (b"", body):
            pieces.clear()
            with pool.request("PUT", url, {}, content) as answer:
                assert answer.fill(memoryview(bytearray(2)), StallPolicy(1, 5)) == 2
    assert sum(size for size, _ in pieces[1:]) == len(body)
    assert max(size for size, _ in pieces) <= 256 * 1024
    assert {seconds for _, seconds in pieces} == {10}
