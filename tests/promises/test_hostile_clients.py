"""Clients that speak HTTP as no client should, to every port of both services: each gets a refusal or the end of its connection."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.agent.process import COMMAND, Program
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import until
from tests.support.network.ports import free_port
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("hostile-input")

PATIENCE_SECONDS = 45.0  # nobody is served for longer than this without having said something sensible
MOST_MIB = 64  # that all of this together may cost a service in memory
MEGABYTE = 1_000_000
DESCRIPTORS = 96  # where they are short


def asked(line: str, *headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((f"{line} HTTP/1.1".encode("latin-1"), b"Host: a", *headers, b"", body))


def json_of(body: bytes, *headers: bytes) -> bytes:
    size = b"Content-Length: %d" % len(body)
    return asked("POST /mirror", b"Content-Type: application/json", size, *headers, body=body)


REFUSED = {  # the request: what may come back begins with one of these, or nothing does
    "HTTP/0.9": b"GET /chunks/x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
    "nothing but zeros": bytes(70_000),
    "a line without end": b"GET /" + b"a" * MEGABYTE,
    "a header of a megabyte": asked("GET /healthz", b"X: " + b"a" * MEGABYTE),
    "a hundred thousand headers": asked("GET /healthz", *[b"X: a"] * 100_000),
    "two lengths": asked("POST /stages", b"Content-Length: 1", b"Content-Length: 2", body=b"ab"),
    "a length and pieces": asked(
        "POST /stages", b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"
    ),
    "a negative length": asked("POST /mirror", b"Content-Length: -1"),
    "a length of no number": asked("POST /mirror", b"Content-Length: 0x10"),
    "a length of a thousand digits": asked("POST /mirror", b"Content-Length: " + b"9" * 1000),
    "an unknown coding": asked("POST /mirror", b"Transfer-Encoding: gzip", body=b"abc"),
    "a NUL in the path": asked("GET /chunks/\x00"),
    "no host": b"GET /chunks/x HTTP/1.1\r\n\r\n",
    "a space before the colon": b"GET /healthz HTTP/1.1\r\nHost : a\r\n\r\n",
    "a method in lower case": asked("gEt /healthz"),
    "CONNECT": asked("CONNECT 127.0.0.1:22"),
    "TRACE": asked("TRACE /"),
    "another host's address": asked("GET http://169.254.169.254/latest/meta-data"),
    "dots that are written out": asked("GET /chunks/%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
    "dots": asked("GET /../../../../etc/passwd"),
    "a manifest above the root": asked("GET /manifests/..%2f..%2fmirror.sqlite"),
    "bytes that are no text": asked("GET /\xff\xfe"),
    "a token of a megabyte": asked("GET /manifests", b"Authorization: Bearer " + b"a" * MEGABYTE),
    "a hundred thousand ranges": asked("GET /chunks/x", b"Range: bytes=" + b"0-1," * 15_000),
    "JSON nested a hundred thousand times": json_of(b"[" * 100_000 + b"]" * 100_000),
    "a number of a million digits": json_of(b"9" * MEGABYTE),
    "half a letter": json_of(b'{"weights":"\\ud800"}'),
    "a compressed body": json_of(b"\x1f\x8b" + bytes(18), b"Content-Encoding: gzip"),
}
UNFINISHED = {
    "a piece of a terabyte": asked("POST /mirror", b"Transfer-Encoding: chunked", body=b"ffffffffff\r\nabc"),
    "less than was announced": asked("POST /stages", b"Content-Length: 100", body=b"{"),
}
SILENT = [b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: "]  # and then nothing


def rss_mib(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "VmRSS:") // 1024


async def talk(port: int, request: bytes) -> bytes:
    """What comes back until the service hangs up, or has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                writer.write(request)
                await writer.drain()
                return await reader.read(100_000)
            except ConnectionError:
                return b""
    finally:
        writer.close()


@dataclass
class Service:
    """One of our services: its process, its ports, and what it has logged once it has ended."""

    pid: int
    ports: list[int]
    log: Path


@asynccontextmanager
async def a_mirror(folder: Path, *before: str) -> AsyncIterator[Service]:
    async with await ServingProcess.start(folder, command=(*before, *SERVE)) as mirror:
        ports = [int(mirror.url.rpartition(":")[2]), mirror.data_port]
        yield Service(mirror.process.pid, ports, folder / "log")
        assert (await mirror.http.get("/healthz")).status_code == 200
        await mirror.end(signal.SIGTERM)
        (folder / "log").write_text(mirror.log)


@asynccontextmanager
async def an_agent(folder: Path, *before: str) -> AsyncIterator[Service]:
    ports = [free_port(), free_port()]
    async with Program(folder, command=(*before, *COMMAND)).daemon(
        BDN_AGENT_PORT=str(ports[0]), BDN_AGENT_DATA_PORT=str(ports[1])
    ) as daemon:
        yield Service(daemon.process.pid, ports, folder / "daemon.log")
        assert await daemon.client.ready()


@pytest.mark.parametrize("service", [a_mirror, an_agent], ids=["mirror", "agent"])
async def test_nonsense_is_refused_on_every_port_and_costs_nothing(
    service: Callable[[Path], AbstractAsyncContextManager[Service]], tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    requests = REFUSED | (UNFINISHED if scale.is_full else {})  # they take half a minute each
    async with service(tmp_path / "data") as running:
        for port in running.ports:
            await talk(port, REFUSED["a method in lower case"])  # what is loaded late is loaded now
        before = rss_mib(running.pid)
        for port in running.ports:
            for name, request in requests.items():
                answer = await talk(port, request)
                status = answer.split(b" ", 2)[1] if answer else b""
                assert status == b"" or status[:1] == b"4" or status in {b"501", b"505"}, (name, answer[:300])
                assert b"root:" not in answer
                tally.add(scenarios=1, refused=1)
        assert rss_mib(running.pid) - before < MOST_MIB
    assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("service", [a_mirror, an_agent], ids=["mirror", "agent"])
async def test_a_hundred_clients_that_never_end_their_heads_delay_nobody_and_are_hung_up_on(
    service: Callable[[Path], AbstractAsyncContextManager[Service]], tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    async with service(tmp_path / "data") as running, AsyncExitStack() as stack:
        readers = []
        for port in running.ports:
            for begun in SILENT * 50:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(begun)
                readers.append(reader)
        for port in running.ports:
            answer = await talk(port, b"GET /nothing-here HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
        if scale.is_full:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(*(reader.read() for reader in readers))
        tally.add(scenarios=len(readers))


@pytest.mark.parametrize("service", [a_mirror, an_agent], ids=["mirror", "agent"])
async def test_more_clients_than_descriptors_wait_and_the_log_stays_small(
    service: Callable[..., AbstractAsyncContextManager[Service]], tmp_path: Path, tally: Tally
) -> None:
    limited = ("sh", "-c", f'ulimit -Sn {DESCRIPTORS}; exec "$@"', "sh")
    async with service(tmp_path / "data", *limited) as running:
        open_files = Path(f"/proc/{running.pid}/fd")
        for port in running.ports:
            async with AsyncExitStack() as stack:
                clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * DESCRIPTORS)]
                for _, writer in clients:
                    stack.callback(writer.transport.abort)
                if port == running.ports[0]:  # the data plane takes no more than it has descriptors for
                    await until(lambda: len([*open_files.iterdir()]) >= DESCRIPTORS - 2, "none is left")
            answer = b""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not answer:  # who comes before it has noticed that the others left may be hung up on
                    answer = await talk(port, b"GET /nothing-here HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
            tally.add(scenarios=1, faults=1)
    log = running.log.read_text()
    assert "connections have to wait" in log
    assert len(log) < 20_000
