"""Clients that speak HTTP as no client should, requests made up from the OpenAPI documents, and readers who suspect every chunk."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bdn.core.chunk import Digest, digest_of
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import waiting
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.http_fields import SUSPECT_HEADER
from node_agent.api import build_app
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import COMMAND, Program
from tests.support.agent.rig import Rig
from tests.support.agent.site import serving_agent
from tests.support.content.noise import MIB, noise
from tests.support.crash.spoiled import Spoiler
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import Json, mirror_under_test, source
from tests.support.network.ports import free_port
from tests.support.promises.tally import FULL, Tally, at_scale

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("hostile-input")
PATIENCE_SECONDS = 45.0  # nobody is served for longer than this without having said something sensible
MOST_MIB = 64  # that all of this together may cost a service in memory
MEGABYTE = 1_000_000
DESCRIPTORS = 96  # where they are short


def asked(line: str, *headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((f"{line} HTTP/1.1".encode("latin-1"), b"Host: localhost", *headers, b"", body))


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
SILENT = [b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "]  # and then nothing


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
    service: Callable[[Path], AbstractAsyncContextManager[Service]], tmp_path: Path, tally: Tally
) -> None:
    requests = REFUSED | (UNFINISHED if FULL else {})  # they take half a minute each
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
async def test_more_clients_than_descriptors_delay_nobody_and_the_log_stays_small(
    service: Callable[..., AbstractAsyncContextManager[Service]], tmp_path: Path, tally: Tally
) -> None:
    """They stay connected: the oldest of them make room for each other client."""
    limited = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
    async with service(tmp_path / "data", *limited) as running, AsyncExitStack() as stack:
        for port in running.ports:
            crowd = []
            for begun in [b"", *SILENT] * DESCRIPTORS:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(begun)
                crowd.append(reader)
            for other in running.ports:
                for _ in range(3):
                    answer = await talk(
                        other, b"GET /nothing-here HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                    )
                    assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
            assert not crowd[-1].at_eof()
            tally.add(scenarios=1, faults=1)
    log = running.log.read_text()
    assert "connections have to wait" not in log
    assert "cannot accept chunk clients" not in log
    assert len(log) < 20_000


# --- Both services under requests that their own OpenAPI documents make up, right and wrong: never a 500, a traceback, or a file outside ---
NOWHERE = "http://127.0.0.1:1"  # which the egress guard refuses, so that no request waits for an upstream
TOKEN = "operator-token"
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass
class Fuzzed:
    """Every operation of one service, with requests that are right and requests that are wrong by its own description."""

    app: FastAPI
    http: httpx2.AsyncClient  # that needs no socket
    headers: Mapping[str, str]
    tally: Tally

    async def run(self, examples: int) -> None:
        listener = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(self.app, listener):
            await asyncio.to_thread(self._operations, f"{url}/openapi.json", examples)

    def _operations(self, document: str, examples: int) -> None:
        for found in schemathesis.openapi.from_url(document).get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr] # or this fails, as it should
            self._operation(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), examples)
            with suppress(Unsatisfiable):  # every request of some operations is right
                self._operation(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), examples)

    async def spoil(self, *also: str) -> None:
        """What strategies for text never make up, in every place: they write UTF-8, and seldom a NUL."""
        document = (await self.http.get("/openapi.json")).json()
        for one in Spoiler(document, also).requests():
            headers = {**self.headers, "Content-Type": "application/json"}
            response = await self.http.request(one.method, one.path, content=one.body, headers=headers)
            shown = f"{one.method} {one.path:.200} {one.what}: {response.status_code} {response.text[:300]}"
            # Nothing is away, so that nobody shall come again later; but there may be no room for what is asked for.
            assert response.status_code < 500 or response.status_code == 507, shown
            self._judge(response, shown, has_body=one.method != "head")

    def _operation(self, cases: Any, examples: int) -> None:
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def attempt(case: Any) -> None:
            self._attempt(case)

        attempt()

    def _attempt(self, case: Any) -> None:
        self._hurry(case)
        response = case.call(headers=dict(self.headers), timeout=20)
        shown = f"{case.method} {response.request.url} {response.request.body!r:.500}: {response.status_code} {response.text[:300]}"
        self._judge(response, shown, has_body=case.method != "HEAD")
        case.validate_response(response, checks=CONFORMANCE)

    def _judge(self, response: Any, shown: str, *, has_body: bool = True) -> None:
        self.tally.add(scenarios=1)
        assert response.status_code != 500, shown
        if response.status_code >= 400 and has_body:
            error = json.loads(response.text)["error"]
            assert set(error) == {"code", "message", "retryable", "details"}, shown
            assert error["code"] != "INTERNAL", shown
            assert "Traceback" not in response.text, shown
            self.tally.add(refused=1)

    @staticmethod
    def _hurry(case: Any) -> None:
        """Nobody waits: a heartbeat may be kept open for half a minute, and so may a look at what does not end."""
        if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
            case.body["wait_seconds"] = 0
        if not isinstance(case.query, NotSet) and isinstance((case.query or {}).get("wait"), int | float):
            case.query["wait"] = 0


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of which everything but ``data`` must stay as it is."""
    (tmp_path / "beside").write_text("untouched")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/loop").symlink_to("loop")
    yield tmp_path / "data"
    assert {name for name in tree(tmp_path) if name.partition("/")[0] != "data"} == {"beside"}
    assert (tmp_path / "beside").read_text() == "untouched"


@pytest.fixture(autouse=True)
def nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info and record.levelno >= ERROR] == []


@pytest.mark.parametrize("auth", ["off", "token"])
async def test_the_mirror_answers_whatever_its_own_description_makes_up(
    auth: str, outside: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "")
    for name in ("HF_ENDPOINT", "AWS_ENDPOINT_URL_S3", "BDN_R2_ENDPOINT_URL"):
        monkeypatch.setenv(name, NOWHERE)
    given_token: Json = {"auth": auth, "token": TOKEN} if auth == "token" else {}
    headers = {"Authorization": f"Bearer {TOKEN}"} if auth == "token" else {}
    async with mirror_under_test(outside, **given_token) as mirror:
        fuzzed = Fuzzed(mirror.service.api, mirror.http, headers, tally)
        # What is looked for is compared with it.
        begun = {"weights": [{"source": "hf://org/model", "mount_location": "/m"}]}
        assert (await mirror.http.post("/mirror", json=begun, headers=headers)).status_code == 202
        if auth == "token" or FULL:  # who asks changes nothing of what is spoiled or made up
            await fuzzed.spoil()
        if auth == "off" or FULL:
            await fuzzed.run(at_scale(3, 10))
        assert (await mirror.http.get("/healthz")).status_code == 200


async def test_the_agent_answers_what_its_description_makes_up(outside: Path, tally: Tally) -> None:
    with AgentMirror().running() as mirror:
        async with serving_agent(Rig(mirror, outside, {"exposure": "symlink"})) as site:  # and no job volume is mounted
            fuzzed = Fuzzed(build_app(site.agent), site.http, {}, tally)
            await fuzzed.spoil(str(outside / "loop"))
            await fuzzed.run(at_scale(3, 10))
            assert await site.client.ready()


# --- Readers who say of every chunk that it came wrong: each is answered, and nobody else waits for them ---
LONGEST_SECONDS: Final = 60.0
WHOLE: Final = noise(2 * MIB, 1)  # a chunk of its own
FILES: Final = {"w.bin": WHOLE, "config.json": b"{}", "other.json": b"[]"}
SUSPECT: Final = {SUSPECT_HEADER: "1"}


@pytest.fixture
def model(upstreams: None, hub: Hub) -> None:
    hub.repo("org/model").commit(FILES)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Digest]:
    """What was read in the store because somebody suspected it."""
    digests: list[Digest] = []
    examine = Damages._examine

    async def noting(self: Damages, digest: Digest) -> str | None:
        digests.append(digest)
        return await examine(self, digest)

    monkeypatch.setattr(Damages, "_examine", noting)
    return digests


@pytest.mark.usefixtures("backend", "model")
async def test_many_who_suspect_at_once_are_answered_as_one_is(
    tmp_path: Path, tally: Tally, examined: list[Digest]
) -> None:
    """More than the loop has threads: what each of them waits for needs such a thread, too.

    A bucket's chunks are in memory while they are sent: beyond the organisation's share, requests are refused for now.
    """
    count = at_scale(40, 200)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        manifest = await mirror.manifest(source("hf://org/model"))
        names = [digest_of(WHOLE), Digest.parse(manifest), digest_of(b"nobody has this")]
        for name in names:
            alone = await mirror.http.head(f"/chunks/{name}", headers=SUSPECT)
            asked = [mirror.http.head(f"/chunks/{name}", headers=SUSPECT) for _ in range(count)]
            *answers, beside = await asyncio.gather(*asked, mirror.http.get("/readyz"))
            tally.add(scenarios=count, refused=count if alone.status_code == 404 else 0)
            expected = (alone.status_code, alone.headers)
            served = [one for one in answers if one.status_code != 503]
            tally.add(wrong=sum((one.status_code, one.headers) != expected for one in served))
            assert served
            assert alone.status_code == (404 if name is names[-1] else 200)
            assert beside.status_code == 200
            assert examined.count(name) < count / 4  # once for the one, and twice for all who come together
        suspected = await mirror.http.get(f"/chunks/{names[0]}", headers=SUSPECT)
        assert suspected.content == WHOLE
        assert await mirror.tree(manifest) == FILES


@pytest.mark.usefixtures("backend", "model")
async def test_who_suspects_a_right_chunk_or_none_waits_for_no_writer(tmp_path: Path) -> None:
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror") as mirror:
        await mirror.ready(source("hf://org/model"))
        async with mirror.service.requests.database.write():
            right = await mirror.http.get(f"/chunks/{digest_of(WHOLE)}", headers=SUSPECT)
            nowhere = await mirror.http.get(f"/chunks/{digest_of(b'nobody has this')}", headers=SUSPECT)
    assert right.content == WHOLE
    assert nowhere.status_code == 404


@pytest.mark.usefixtures("backend", "model")
async def test_an_examination_that_takes_too_long_is_a_chunk_that_cannot_be_had_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    disk_answers = asyncio.Event()
    examine = Damages.examine

    async def slowly(*given: object) -> str | None:
        await disk_answers.wait()
        return await examine(*given)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(Damages, "examine", slowly)
    async with asyncio.timeout(LONGEST_SECONDS), mirror_under_test(tmp_path / "mirror", serve=True) as mirror:
        await mirror.ready(source("hf://org/model"))
        plane = f"http://127.0.0.1:{mirror.service.data_port}"
        async with httpx2.AsyncClient(base_url=plane, trust_env=False, timeout=LONGEST_SECONDS) as http:
            with monkeypatch.context() as patched:
                patched.setattr(waiting, "_ANSWER_SECONDS", 0.1)
                refusal = await http.get(f"/chunks/{digest_of(WHOLE)}", headers=SUSPECT)
            disk_answers.set()
            answer = await http.get(f"/chunks/{digest_of(WHOLE)}", headers=SUSPECT)
    error = refusal.json()["error"]
    tally.add(scenarios=1, faults=1, refused=1, wrong=answer.content != WHOLE)
    assert (refusal.status_code, error["code"], error["retryable"]) == (503, "STORE_UNAVAILABLE", True)
