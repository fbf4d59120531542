"""The hub gateway of an agent: what hub clients get on a node, and what the mirror is asked for."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.layout import Manifest
from bdn.wire.hub_schema import HubAnswer
from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from node_agent.gateway import serving_gateway
from tests.support.agent.mirror import AgentMirror, fresh_mirror, missing
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB, noise
from tests.support.network.ports import free_port
from tests.support.waiting import LONGEST_SECONDS, until

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror
WEIGHTS = noise(17 * MIB + 3, 1)  # three chunks
FILES = {"weights": WEIGHTS, "other": noise(9 * MIB + 1, 2), "a.json": b"{}" * 10, "b.json": b"[]", "empty": b""}
AT = "/org/model/resolve/main/"
HUBS_OWN = {"User-Agent": "unknown/None; hf_hub/2.4.0; python/3.12"}


@pytest.fixture
def manifest(mirror: AgentMirror) -> Manifest:
    published = mirror.publish(FILES)
    for path in FILES:
        mirror.offer(AT + path, published, path)
    return published


@asynccontextmanager
async def gateway(rig: Rig, **limits: int) -> AsyncIterator[tuple[Agent, httpx2.AsyncClient]]:
    """An agent, and a client of its gateway."""
    async with (
        rig.agent(gateway=("127.0.0.1", free_port())) as agent,
        serving_gateway(agent, **limits) as url,
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=LONGEST_SECONDS) as client,
    ):
        yield agent, client


async def connected(client: httpx2.AsyncClient, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes little at a time, and has sent this."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((client.base_url.host, client.base_url.port))
    raw.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=raw, limit=65536)
    writer.write(f"{head}\r\nHost: localhost\r\n\r\n".encode())
    return reader, writer


def opened(path: Path) -> int:
    """How often this process has the file open, also if it is gone from its folder."""
    links: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it may have been closed meanwhile
            links.append(str(link.readlink()))
    return sum(link.removesuffix(" (deleted)") == str(path) for link in links)


def digest_of(manifest: Manifest, path: str) -> Digest:
    return next(entry.digest for entry in manifest.files if entry.path == path)


# --- ranges, heads, headers ---


async def test_ranges_are_those_of_the_hub_and_its_headers_those_of_its_head(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    size = len(WEIGHTS)
    parts = {
        "bytes=0-0": (0, 1),
        "bytes=5-9": (5, 10),
        f"bytes={8 * MIB - 1}-{8 * MIB}": (8 * MIB - 1, 8 * MIB + 1),
        f"bytes={size - 1}-": (size - 1, size),
        f"bytes=7-{2 * size}": (7, size),
        "bytes=-5": (size - 5, size),
        f"bytes=-{2 * size}": (0, size),
    }
    async with gateway(rig) as (_, client):
        head = await client.head(f"{AT}weights")
        assert (head.status_code, head.headers["content-length"], mirror.requests) == (200, str(size), 0)
        named = ("etag", "x-repo-commit", "accept-ranges", "content-type")
        for wanted, (start, stop) in parts.items():
            answer = await client.get(f"{AT}weights", headers={"Range": wanted})
            assert (answer.status_code, answer.content == WEIGHTS[start:stop]) == (206, True), wanted
            assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
            assert answer.headers["content-length"] == str(stop - start)
            assert {name: answer.headers[name] for name in named} == {name: head.headers[name] for name in named}
        for wanted in ("bytes=0-0,2-3", "bytes=9-5", "items=0-1", "bytes=-", ""):
            answer = await client.get(f"{AT}a.json", headers={"Range": wanted})
            assert (answer.status_code, answer.content) == (200, FILES["a.json"]), wanted
            assert "content-range" not in answer.headers
        for wanted in (f"bytes={size}-", f"bytes={size}-{size + 1}", "bytes=-0"):
            answer = await client.get(f"{AT}weights", headers={"Range": wanted})
            assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}"), wanted


async def test_an_empty_file(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (_, client):
        answer = await client.get(f"{AT}empty")
        assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "0", b"")
        assert (await client.get(f"{AT}empty", headers={"Range": "bytes=0-0"})).status_code == 416


async def test_a_file_too_large_for_the_hub_s_client_is_had_from_another_port(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with gateway(rig, most_bytes=9 * MIB) as (_, client):
        small = await client.head(f"{AT}a.json")
        assert (small.status_code, small.headers["content-length"]) == (200, str(len(FILES["a.json"])))
        head = await client.head(f"{AT}weights")
        assert (head.status_code, head.headers["etag"]) == (302, '"weights"')
        assert "content-length" not in head.headers
        there = httpx2.URL(head.headers["location"])
        assert (there.host, there.path) == (client.base_url.host, f"{AT}weights")
        assert there.port != client.base_url.port
        assert (await client.head(there)).headers["content-length"] == str(len(WEIGHTS))
        assert (await client.get(there)).content == WEIGHTS
        assert (await client.get(there, headers={"Origin": "https://page.example"})).status_code == 403


async def test_the_address_at_another_port_is_quoted_as_the_client_quoted_it(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    target = "/org/model/resolve/refs%2Fpr%2F1/a%3Fb%20%25.bin?download=true"
    mirror.offer(target, manifest, "weights")
    async with gateway(rig, most_bytes=9 * MIB) as (_, client):
        head = await client.head(target)
        assert head.status_code == 302
        assert head.headers["location"].endswith(target)


async def test_nothing_is_compressed(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    mirror.hub_answers["/api/models/org/model"] = HubAnswer(
        headers={"content-type": "application/json"}, body='{"id": "%s"}' % ("x" * 10_000)
    )
    async with gateway(rig) as (_, client):
        for target in ("/api/models/org/model", f"{AT}weights", f"{AT}a.json"):
            answer = await client.get(target, headers={"Accept-Encoding": "gzip, deflate, br, zstd"})
            assert answer.status_code == 200
            assert "content-encoding" not in answer.headers
            assert answer.headers["content-length"] == str(len(answer.content))


# --- what passes between client and mirror ---


async def test_the_mirror_gets_what_the_client_wrote_and_the_client_what_the_mirror_says(
    rig: Rig, mirror: AgentMirror, caplog: pytest.LogCaptureFixture
) -> None:
    target = "/api/models/org/model/tree/refs%2Fpr%2F1?recursive=true&x=a%20b"
    warned = {"x-hf-warning": "bdn; stale", "x-error-code": "GatedRepo", "x-error-message": "ask for it"}
    mirror.hub_answers[target] = HubAnswer(status=403, headers={**warned, "link": '</a?b=c>; rel="next"'}, body="[1]")
    caplog.set_level(logging.DEBUG)
    async with gateway(rig) as (_, client):
        sent = {"Authorization": "Bearer hf_secret", "Content-Type": "application/x-www-form-urlencoded"}
        answer = await client.post(target, headers=sent, content=b"paths=a&paths=%C3%A4")
        asked = mirror.hub_requests[0]
        assert (asked.method, asked.target, asked.body) == ("POST", target, "paths=a&paths=%C3%A4")
        assert (asked.authorization, asked.content_type) == (sent["Authorization"], sent["Content-Type"])
        assert (answer.status_code, answer.text) == (403, "[1]")
        assert {name: answer.headers[name] for name in warned} == warned
        assert answer.headers["link"] == f'<{str(client.base_url).rstrip("/")}/a?b=c>; rel="next"'
        mirror.down = True
        assert (await client.get(target, headers=sent)).status_code == 504
    assert "hf_secret" not in caplog.text
    assert not any("hf_secret" in repr(vars(record)) for record in caplog.records if record.name.startswith("node_"))


async def test_failures_of_the_mirror_are_never_401(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (_, client):
        for failure in (UnauthenticatedError("the agent's token"), NotFoundError("a gateway")):
            mirror.hub_failure = failure
            answer = await client.get(f"{AT}a.json")
            assert answer.status_code == 503
            assert answer.headers["x-error-message"]
        mirror.hub_failure, mirror.down = None, True
        answer = await client.get(f"{AT}a.json")
        assert (answer.status_code, bool(answer.headers["x-error-message"])) == (504, True)
        mirror.down = False
        assert (await client.get(f"{AT}a.json")).content == FILES["a.json"]


async def test_a_file_that_cannot_be_filled_is_an_error_and_not_a_part(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    mirror.every = missing
    async with gateway(rig) as (agent, client):
        answer = await client.get(f"{AT}weights")
        assert answer.status_code in (503, 504)
        assert answer.headers["x-error-message"]
        assert not agent.cache.index.leases.is_leased(manifest.digest)
        mirror.every = None
        assert (await client.get(f"{AT}weights")).content == WEIGHTS


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(33):
        yield bytes(MIB // 32)


async def test_requests_that_are_too_large_reach_no_mirror(rig: Rig, mirror: AgentMirror) -> None:
    async with gateway(rig) as (_, client):
        for content in (bytes(MIB + 1), pieces()):
            async with httpx2.AsyncClient(base_url=client.base_url, trust_env=False) as once:
                answer = await once.post("/api/models/org/model/paths-info/main", content=content)
            assert answer.status_code in (400, 413)
        reader, writer = await connected(client, "POST /x HTTP/1.1\r\nTransfer-Encoding: chunked")
        writer.write(b"%x\r\n" % (2 * MIB) + bytes(2 * MIB))  # and no end
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 4")
        writer.transport.abort()
        assert (await client.get(f"/{'x' * 8192}")).status_code in (400, 414)
        assert (await client.get("/x", headers={"Authorization": "x" * 5000})).status_code in (400, 431)
        assert mirror.hub_requests == []
        assert (await client.post("/x", content=bytes(MIB))).status_code == 404
        assert (await client.get(f"/{'x' * 8191}")).status_code == 404
        assert (await client.put("/x")).status_code == 405


async def test_a_connection_with_an_unread_body_is_not_used_again(rig: Rig, mirror: AgentMirror) -> None:
    async with gateway(rig) as (_, client):
        answer = await client.post("/x", content=bytes(4 * MIB))
        assert answer.status_code in (400, 413)
        assert answer.headers.get("connection") == "close"


async def test_web_pages_of_others_are_refused(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (_, client):
        own = f"localhost:{client.base_url.port}"
        foreign = [
            {"Host": "rebound.example"},
            {"Host": f"rebound.example:{client.base_url.port}", "Origin": "http://rebound.example"},
            {"Host": own, "Origin": "https://page.example"},
            {"Host": own, "Origin": "http://localhost:1"},
            {"Host": own, "Origin": "null"},
        ]
        for headers in foreign:
            assert (await client.get(f"{AT}a.json", headers=headers)).status_code == 403, headers
        assert mirror.hub_requests == []
        for headers in ({"Host": own}, {"Host": own, "Origin": f"http://{own}"}):
            assert (await client.get(f"{AT}a.json", headers=headers)).status_code == 200, headers


# --- the cache ---


async def test_only_the_file_of_a_manifest_is_filled_and_sent_from_the_cache_again(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with gateway(rig) as (agent, client):
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        assert dict(mirror.chunk_requests) == dict.fromkeys(mirror.chunks(manifest, "weights"), 1)
        mirror.forget()
        for wanted in ({}, {"Range": "bytes=0-0"}):
            assert (await client.get(f"{AT}weights", headers=wanted)).status_code in (200, 206)
        assert mirror.requests == 0
        assert not agent.cache.index.is_complete(manifest.digest)
        assert (await client.get(f"{AT}other")).content == FILES["other"]
        assert dict(mirror.chunk_requests) == dict.fromkeys(mirror.chunks(manifest, "other"), 1)
    async with gateway(rig) as (_, client):  # the next agent on this disk
        mirror.forget()
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        assert mirror.requests == 0


async def test_many_clients_of_one_file_are_one_fill(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (_, client):
        answers = await asyncio.gather(*[client.get(f"{AT}weights") for _ in range(20)])
        assert [answer.content == WEIGHTS for answer in answers] == [True] * 20
        assert dict(mirror.chunk_requests) == dict.fromkeys(mirror.chunks(manifest, "weights"), 1)


async def test_a_slow_client_gets_all_bytes_of_a_file_that_is_evicted_meanwhile(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with gateway(rig) as (agent, client):
        cached = agent.places.file(digest_of(manifest, "weights"))
        reader, writer = await connected(client, f"GET {AT}weights HTTP/1.1")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await until(lambda: not agent.cache.index.leases.is_leased(manifest.digest))
        (item,) = await agent.evictions.evict(EvictCommand(id="evc_1", all=True))
        assert (item.manifest, item.refused) == (str(manifest.digest), False)
        assert not cached.exists()
        assert opened(cached) == 1  # the answer is not over

        assert await reader.readexactly(len(WEIGHTS)) == WEIGHTS
        await until(lambda: opened(cached) == 0)
        writer.close()


async def test_a_file_that_was_changed_on_disk_is_repaired_before_it_is_sent(
    rig: Rig, mirror: AgentMirror, manifest: Manifest
) -> None:
    async with gateway(rig) as (agent, client):
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        cached = agent.places.file(digest_of(manifest, "weights"))
        cached.chmod(0o600)
        with cached.open("r+b") as file:
            file.seek(9 * MIB)
            file.write(bytes(100))
        mirror.forget()
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        assert set(mirror.chunk_requests) <= set(mirror.chunks(manifest, "weights")[1:2])


async def test_a_client_that_goes_leaves_nothing_open(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (agent, client):
        cached = agent.places.file(digest_of(manifest, "weights"))
        for _ in range(3):
            reader, writer = await connected(client, f"GET {AT}weights HTTP/1.1")
            await reader.readuntil(b"\r\n\r\n")
            assert opened(cached) == 1
            writer.transport.abort()
            await until(lambda: opened(cached) == 0)
        assert not agent.cache.index.leases.is_leased(manifest.digest)
        assert (await client.get(f"{AT}weights")).content == WEIGHTS


async def test_a_fill_goes_on_without_its_client(rig: Rig, mirror: AgentMirror, manifest: Manifest) -> None:
    async with gateway(rig) as (agent, client):
        gate, asked = mirror.hold(mirror.chunks(manifest, "weights")[1])
        _, writer = await connected(client, f"GET {AT}weights HTTP/1.1")
        await asked.wait()
        writer.transport.abort()
        gate.set()
        digest = digest_of(manifest, "weights")
        await until(lambda: agent.cache.index.ledger.is_committed(digest))
        mirror.forget()
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        assert mirror.requests == 0


# --- copies and fills that take long ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_agent.gateway._PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("node_agent.gateway._POLL_SECONDS", 0.2)
    monkeypatch.setattr("node_agent.gateway._DROP_SECONDS", 0.05)


@pytest.mark.parametrize("headers", [HUBS_OWN, {"User-Agent": "hf-hub/0.4"}, {**HUBS_OWN, "Range": "bytes=70000-"}])
async def test_a_client_gets_first_bytes_while_the_file_is_copied_and_then_the_rest(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None, headers: dict[str, str]
) -> None:
    mirror.offer(f"{AT}weights", manifest, "weights", is_pending=True)
    mirror.hub_beginnings[f"{AT}weights"] = WEIGHTS[:100_000]
    start = int(headers.get("Range", "bytes=0-")[6:-1])
    async with gateway(rig) as (_, client), client.stream("GET", f"{AT}weights", headers=headers) as answer:
        assert answer.status_code == (206 if start else 200)
        assert answer.headers["content-length"] == str(len(WEIGHTS) - start)
        assert answer.headers["x-hf-warning"].startswith("bdn; ")
        got = b""
        async for piece in answer.aiter_bytes():
            got += piece
            if len(got) >= 48:
                mirror.copied.set()
        assert got == WEIGHTS[start:]


@pytest.mark.parametrize("case", ["failed", "wrong", "exhausted"])
async def test_first_bytes_are_no_whole_file_if_the_copy_fails_or_differs(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None, case: str
) -> None:
    target = f"{AT}a.json"
    mirror.offer(target, manifest, "a.json", is_pending=True)
    mirror.hub_beginnings[target] = b"not what" if case == "wrong" else FILES["a.json"]
    async with gateway(rig) as (_, client), client.stream("GET", target, headers=HUBS_OWN) as answer:
        assert answer.status_code == 200
        if case == "failed":
            mirror.hub_answers[target] = HubAnswer(status=504, headers={"x-error-message": "the hub is gone"})
        if case == "wrong":
            mirror.copied.set()
        with pytest.raises(httpx2.TransportError):
            await answer.aread()


async def test_a_client_of_first_bytes_that_goes_ends_the_requests(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None
) -> None:
    mirror.offer(f"{AT}weights", manifest, "weights", is_pending=True)
    mirror.hub_beginnings[f"{AT}weights"] = WEIGHTS[:100_000]
    async with gateway(rig) as (_, client):
        reader, writer = await connected(client, f"GET {AT}weights HTTP/1.1")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        await quiet(lambda: len(mirror.hub_requests), client.get)
    assert mirror.requests == 0


async def test_a_pending_copy_has_the_hub_s_client_come_again(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None
) -> None:
    mirror.offer(f"{AT}weights", manifest, "weights", is_pending=True)
    async with gateway(rig) as (_, client):
        for eta, least in ((None, 1), (7.0, 7), (10**9, 10)):
            pending = mirror.hub_answers[f"{AT}weights"].model_copy(update={"eta_seconds": eta})
            mirror.hub_answers[f"{AT}weights"] = pending
            answer = await client.get(f"{AT}weights", headers=HUBS_OWN)
            assert answer.status_code == 429
            assert least <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-hf-warning"].startswith("bdn; ")
        assert mirror.requests == 0
        mirror.copied.set()
        assert (await client.get(f"{AT}weights")).content == WEIGHTS


@pytest.mark.parametrize("headers", [{"User-Agent": "hf-hub/0.4"}, {**HUBS_OWN, "Range": "bytes=0-0"}])
async def test_a_pending_copy_is_waited_for_by_clients_that_repeat_nothing(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None, headers: dict[str, str]
) -> None:
    mirror.offer(f"{AT}a.json", manifest, "a.json", is_pending=True)
    if "Range" in headers:  # a part of one byte has no beginning that may be sent
        mirror.hub_beginnings[f"{AT}a.json"] = FILES["a.json"]
    async with gateway(rig) as (_, client):
        waiting = asyncio.create_task(client.get(f"{AT}a.json", headers=headers))
        await until(lambda: len(mirror.hub_requests) > 2)  # longer than the hub's client would wait
        assert not waiting.done()
        mirror.copied.set()
        assert (await waiting).content in (FILES["a.json"], FILES["a.json"][:1])


async def test_a_client_of_a_pending_copy_that_goes_ends_the_requests(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None
) -> None:
    mirror.offer(f"{AT}a.json", manifest, "a.json", is_pending=True)
    async with gateway(rig) as (_, client):
        _, writer = await connected(client, f"GET {AT}a.json HTTP/1.1")
        await until(lambda: mirror.hub_requests)
        writer.transport.abort()
        await quiet(lambda: len(mirror.hub_requests), client.get)
    assert mirror.requests == 0


async def quiet(count: Callable[[], int], get: Callable[[str], Awaitable[object]]) -> None:
    """Until nothing is counted any more while another request is answered several times."""
    async with asyncio.timeout(LONGEST_SECONDS):
        before = -1
        while before != count():
            before = count() + 8
            for _ in range(8):
                await get("/x")
                await asyncio.sleep(0.05)


async def test_a_long_fill_has_the_hub_s_client_come_again_and_goes_on(
    rig: Rig, mirror: AgentMirror, manifest: Manifest, impatient: None
) -> None:
    async with gateway(rig) as (_, client):
        gate, asked = mirror.hold(mirror.chunks(manifest, "weights")[1])
        answers = [await client.get(f"{AT}weights", headers=HUBS_OWN) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [429] * 3
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert asked.is_set()
        gate.set()
        assert (await client.get(f"{AT}weights")).content == WEIGHTS
        assert dict(mirror.chunk_requests) == dict.fromkeys(mirror.chunks(manifest, "weights"), 1)


# --- kills ---


async def test_an_agent_that_was_killed_in_a_fill_gives_the_whole_file_afterwards(
    mirror: AgentMirror, manifest: Manifest, tmp_path: Path
) -> None:
    program = Program(tmp_path, mirror.url)
    port = free_port()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        gate, asked = mirror.hold(mirror.chunks(manifest, "weights")[2])
        async with program.daemon(BDN_AGENT_GATEWAY=f"127.0.0.1:{port}") as daemon:
            cut = asyncio.create_task(client.get(f"{AT}weights"))
            await asked.wait()
            await daemon.kill()
            with pytest.raises(httpx2.TransportError):
                await cut
        gate.set()
        async with program.daemon(BDN_AGENT_GATEWAY=f"127.0.0.1:{port}"):
            assert (await client.get(f"{AT}weights")).content == WEIGHTS
            assert max(mirror.chunk_requests.values()) <= 2
            mirror.forget()
            assert (await client.get(f"{AT}weights")).content == WEIGHTS
            assert mirror.requests == 0
