"""Both of our servers over TLS, and their clients: believed, unknown, plain, stalled and very many; and a change of certificates."""

import asyncio
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import BdnError, StoreUnavailableError
from bdn.net import api_server
from bdn.net.api_clients import MirrorClient
from bdn.net.api_server import TimedProtocol, bind_tcp, serving
from bdn.net.chunk_server.connection import Timeouts
from bdn.net.chunk_server.encrypted import EncryptedSocket, encrypted
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.client import OutageRetry
from bdn.net.http1.connection import Connection, NoAnswerError
from bdn.net.http1.pool import ConnectionPool, Dialer
from bdn.net.tls import Authorities, Certificate, kernel_encrypts
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.http_fields import chunk_path
from bdn.wire.shapes import UntrustedServiceError
from tests.support.content.readers import read_chunk
from tests.support.content.shelves import Shelf, read_answer, read_to_end
from tests.support.network.authority import Authority, new_authority
from tests.support.network.raw_server import RawServer
from tests.support.network.service import new_app

CHUNK = b"what only its readers may see. " * 10_000 + os.urandom(100_000)
PATH = chunk_path(digest_of(CHUNK))
PATIENT = Timeouts(3600.0, 3600.0, 3600.0)
ULP = Path("/proc/sys/net/ipv4/tcp_available_ulp").read_text().split()
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a handshake begins
Serve = Callable[[Certificate | None, Timeouts], AbstractAsyncContextManager[int]]


@asynccontextmanager
async def api(certificate: Certificate | None, _: Timeouts) -> AsyncIterator[int]:
    listener = bind_tcp("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    async with serving(new_app(), listener, certificate=certificate):
        yield port


@asynccontextmanager
async def data_plane(certificate: Certificate | None, timeouts: Timeouts) -> AsyncIterator[int]:
    shelf = Shelf()
    shelf.add(CHUNK)
    with closing(ChunkServer(shelf, "127.0.0.1", 0, certificate=certificate, timeouts=timeouts)) as server:
        server.start()
        yield server.port


@dataclass(frozen=True)
class Server:
    """One of both servers: how it is started, and what it answers."""

    serve: Serve
    path: str
    body: bytes


SERVERS = {"api": Server(api, "/orders?limit=3", b"[0,1,2]"), "data plane": Server(data_plane, PATH, CHUNK)}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    return SERVERS[request.param]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "unused")


@pytest.fixture(scope="module")
def certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate("BDN_TLS", *authority.issue(tmp_path_factory.mktemp("shown"), "localhost", "127.0.0.1"))


@pytest.fixture(scope="module")
def believing(authority: Authority) -> Authorities:
    return Authorities(authority.certificates)


@pytest.fixture
def pool(believing: Authorities) -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=60, authorities=believing)) as made:
        yield made


def ask(pool: ConnectionPool, port: int, path: str) -> tuple[int, bytes]:
    with pool.get(f"https://localhost:{port}{path}", {}) as answer:
        return answer.status, answer.read(2 * CHUNK_SIZE)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=40)  # which only a hang meets


async def test_who_is_believed_is_asked_again_and_again_on_one_connection(
    server: Server, certificate: Certificate, pool: ConnectionPool
) -> None:
    async with server.serve(certificate, PATIENT) as port:
        for _ in range(3):
            assert await asyncio.to_thread(ask, pool, port, server.path) == (200, server.body)


async def test_nothing_of_a_chunk_is_on_the_wire_as_it_is(certificate: Certificate, pool: ConnectionPool) -> None:
    """Neither while it is sent nor where the server breaks it off."""
    seen = bytearray()

    def relay(connection: socket.socket) -> None:
        with connect(port) as other:
            back = threading.Thread(target=carry, args=(connection, other))
            back.start()
            carry(other, connection, seen)
            back.join()

    async with data_plane(certificate, PATIENT) as port:
        with RawServer(relay) as between:
            asked = int(between.url.rpartition(":")[2])
            assert await asyncio.to_thread(ask, pool, asked, PATH) == (200, CHUNK)
            pool.close()
    assert len(seen) > len(CHUNK)
    assert b"only its readers" not in seen
    assert CHUNK[-1000:] not in seen
    assert b"HTTP/1.1" not in seen


@pytest.mark.skipif("tls" not in ULP, reason="this kernel does not encrypt (CONFIG_TLS; modprobe tls)")
async def test_the_kernel_encrypts_chunks_where_it_can(certificate: Certificate, pool: ConnectionPool) -> None:
    """And it says so of no other connection. That it encrypts, and what comes is right: the test before."""

    def connections() -> int:
        return int(re.findall(r"TlsTxSw\s+(\d+)", Path("/proc/net/tls_stat").read_text())[0])

    before = connections()
    async with data_plane(certificate, PATIENT) as port:
        assert await asyncio.to_thread(ask, pool, port, PATH) == (200, CHUNK)
        with connect(port) as plain:
            assert not kernel_encrypts(plain)
    assert connections() == before + 1


def carry(source: socket.socket, sink: socket.socket, seen: bytearray | None = None) -> None:
    while piece := source.recv(65536):
        if seen is not None:
            seen += piece
        sink.sendall(piece)
    sink.shutdown(socket.SHUT_WR)


def test_a_connection_whose_tls_has_ended_sends_nothing_as_it_is(
    certificate: Certificate, believing: Authorities
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, connect(door.getsockname()[1]) as plain:
        accepted, _ = door.accept()
        served: list[EncryptedSocket] = []

        def shake() -> None:
            served.append(encrypted(accepted, certificate.context()))
            served[0].do_handshake()

        shaking = threading.Thread(target=shake)
        shaking.start()
        client = believing.context().wrap_socket(plain, server_hostname="localhost")
        shaking.join()
        with client, served[0] as connection:
            both = [threading.Thread(target=side.unwrap) for side in (client, connection)]
            for side in both:
                side.start()
            for side in both:
                side.join()
            with pytest.raises(ConnectionAbortedError):
                connection.send(b"in the clear")


@pytest.mark.parametrize(
    "request_bytes", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.1\r\n" + bytes(300_000)]
)
async def test_who_speaks_plain_http_to_a_port_of_tls_is_told_so(
    server: Server, certificate: Certificate, request_bytes: bytes
) -> None:
    def talk() -> tuple[int, dict[str, str], bytes]:
        with connect(port) as connection:
            connection.sendall(request_bytes)
            return read_answer(connection)

    async with server.serve(certificate, PATIENT) as port:
        status, _, body = await asyncio.to_thread(talk)
        async with MirrorClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(BdnError, match="begins with https://") as raised:
                await client.agents()
    assert status == 400
    assert b"use an address that begins with https://" in body
    assert raised.value.code == "INVALID_REQUEST"


async def test_who_speaks_tls_to_a_port_of_plain_http_is_told_so_at_once(
    server: Server, pool: ConnectionPool, believing: Authorities
) -> None:
    async with server.serve(None, PATIENT) as port:
        with pytest.raises(StoreUnavailableError, match="speaks plain HTTP: use an address that begins with http://"):
            await asyncio.to_thread(read_chunk, HttpChunkReader(pool, f"https://localhost:{port}"), CHUNK)
        async with MirrorClient(f"https://localhost:{port}", authorities=believing) as client:
            with pytest.raises(BdnError, match="speaks plain HTTP: use an address that begins with http://"):
                await client.agents()


async def test_a_certificate_of_an_unknown_authority_is_refused_and_the_setting_is_named(
    server: Server, certificate: Certificate, tmp_path: Path
) -> None:
    strange = Authorities(new_authority(tmp_path, "x").certificates)
    async with server.serve(certificate, PATIENT) as port:
        with (
            closing(ConnectionPool(timeout_seconds=60, authorities=strange)) as pool,
            pytest.raises(StoreUnavailableError, match=r"CERTIFICATE_VERIFY_FAILED.*BDN_TLS_CA"),
        ):
            await asyncio.to_thread(read_chunk, HttpChunkReader(pool, f"https://localhost:{port}"), CHUNK)
        for scheme in ("https", "HTTPS"):
            async with MirrorClient(f"{scheme}://localhost:{port}", authorities=strange) as client:
                with pytest.raises(UntrustedServiceError, match=r"is not trusted: .*BDN_TLS_CA") as raised:
                    await OutageRetry().ask(client.agents)  # at once: asking again for ten minutes would help nobody
            assert (raised.value.code, raised.value.transient) == ("STORE_UNAVAILABLE", False)


async def test_a_client_believes_the_authorities_of_now(
    server: Server, certificate: Certificate, authority: Authority, tmp_path: Path
) -> None:
    moments = itertools.count()
    file = tmp_path / "ca.crt"
    (other := tmp_path / "other").mkdir()
    file.write_bytes(new_authority(other, "x").certificates.read_bytes())
    changing = Authorities(file, lambda: float(next(moments)))
    async with (
        server.serve(certificate, PATIENT) as port,
        MirrorClient(f"https://localhost:{port}", authorities=changing) as client,
    ):
        with pytest.raises(UntrustedServiceError):
            await client.agents()
        file.write_bytes(authority.certificates.read_bytes())
        with pytest.raises(BdnError) as raised:
            await client.agents()
    assert raised.value.code == "NOT_FOUND"


async def test_a_thousand_handshakes_that_do_not_end_hold_nobody_up(
    server: Server, certificate: Certificate, pool: ConnectionPool
) -> None:
    """Half of the clients say nothing, the others how a handshake begins."""

    def come() -> None:
        for number in range(1000):
            stack.enter_context(connect(port)).sendall(HELLO if number % 2 else b"")

    with ExitStack() as stack:
        async with server.serve(certificate, PATIENT) as port:
            await asyncio.to_thread(come)
            assert await asyncio.to_thread(ask, pool, port, server.path) == (200, server.body)
            assert threading.active_count() < 100


@pytest.mark.parametrize("begun", [b"", HELLO])
async def test_a_handshake_has_the_time_of_a_head(
    server: Server, certificate: Certificate, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedProtocol, "request_seconds", 0.1)

    def talk() -> bytes:
        with connect(port) as connection:
            connection.sendall(begun)
            return read_to_end(connection)

    async with server.serve(certificate, Timeouts(3600.0, 0.1, 3600.0)) as port:
        assert await asyncio.to_thread(talk) == b""


async def test_who_reads_slowly_and_asks_to_close_has_the_whole_answer(
    certificate: Certificate, believing: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends TLS when it has written the answer, which is long before the client has read it."""
    monkeypatch.setattr(api_server, "_GRACE_SECONDS", 0.05)

    def read(port: int) -> bytes:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(40)
            plain.connect(("127.0.0.1", port))
            with believing.context().wrap_socket(plain, server_hostname="localhost") as connection:
                connection.sendall(b"GET /orders?limit=500000 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                content = connection.recv(1)
                time.sleep(0.5)
                while piece := connection.recv(65536):
                    content += piece
        return content

    async with api(certificate, PATIENT) as port:
        content = await asyncio.to_thread(read, port)
    assert content.endswith(b",499999]")


async def test_certificates_change_under_load_without_a_request_that_fails(
    server: Server, authority: Authority, believing: Authorities, tmp_path: Path
) -> None:
    moments = itertools.count()  # of which the files are looked at: at each connection
    served = Certificate("BDN_TLS", *authority.issue(tmp_path, "localhost"), lambda: float(next(moments)))
    is_over, answers = threading.Event(), []

    def load() -> None:
        with closing(ConnectionPool(timeout_seconds=60, idle_limit=0, authorities=believing)) as pool:
            while not is_over.is_set():
                answers.append(ask(pool, port, server.path))

    def serial() -> str:
        with believing.context().wrap_socket(connect(port), server_hostname="localhost") as connection:
            found = connection.getpeercert()
            assert found
            return str(found["serialNumber"])

    async with server.serve(served, PATIENT) as port:
        loads = [asyncio.create_task(asyncio.to_thread(load)) for _ in range(3)]
        try:
            serials = [await asyncio.to_thread(serial)]
            for _ in range(5):
                await asyncio.to_thread(authority.issue, tmp_path, "localhost")
                before = len(answers)
                while len(answers) < before + 6:
                    assert not any(one.done() for one in loads), [one.exception() for one in loads if one.done()]
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(60):
                    while (newest := await asyncio.to_thread(serial)) == serials[-1]:
                        pass
                serials.append(newest)
        finally:
            is_over.set()
            await asyncio.gather(*loads)
    assert set(answers) == {(200, server.body)}
    assert len(set(serials)) == len(serials)


async def test_nothing_follows_a_handshake_that_would_pass_for_the_beginning_of_an_answer(
    server: Server, certificate: Certificate, believing: Authorities
) -> None:
    """As the tickets of TLS 1.3 do. Who waits for an answer, and judges how long it takes, waits for something to read."""

    def is_readable() -> bool:
        connection = Dialer(60, authorities=believing).connect(("https", "localhost", port))
        try:
            return connection.is_readable(0.3)
        finally:
            connection.close()

    async with server.serve(certificate, PATIENT) as port:
        assert not await asyncio.to_thread(is_readable)


def test_what_is_encrypted_and_no_answer_does_not_pass_for_the_beginning_of_one(
    authority: Authority, believing: Authorities
) -> None:
    """The tickets of a server that is not ours, which has them: a proxy before it, or a peer of a version before."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as server, ours, theirs:
        accepted = server.submit(authority.server.wrap_socket, theirs, server_side=True)
        connection = Connection(believing.context().wrap_socket(ours, server_hostname="unused"), 60)
        with accepted.result() as other:
            other.settimeout(60)
            connection.send(b"GET")  # the tickets have come before the server has read it
            assert other.recv(3) == b"GET"
            assert not connection.is_readable(0)
            other.sendall(b"HTTP/1.1 200")
            assert connection.is_readable(60)
            other.sendall(b" OK\r\n\r\n")
            assert connection.receive_until(b"\r\n\r\n", 100) == b"HTTP/1.1 200 OK\r\n\r\n"
            assert not connection.is_readable(0)
            connection.send(b"GET")
            other.shutdown(socket.SHUT_RDWR)
            assert connection.is_readable(60)
            with pytest.raises(NoAnswerError):
                connection.receive_until(b"\r\n\r\n", 100)
        connection.close()
