"""Bodies of JSON at and beyond each bound, and of the greatest size, to each route that takes one: refused by a document, and in little memory."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import httpx2
import pytest

from tests.support.agent.mirror import AgentMirror
from tests.support.agent.process import Program
from tests.support.crash.bounds import Bounds
from tests.support.mirror.process import ServingProcess
from tests.support.network.ports import free_port
from tests.support.promises.tally import Tally, at_scale

pytestmark = pytest.mark.promise("hostile-input")
MOST_MIB: Final = 64  # that all of this together may cost a service in memory
SIZE: Final = 4 * 1024**2 - 1024  # within the limit of a request
EVERY: Final = at_scale(4, 1)  # a kind is sent to each fourth route, and a route gets each fourth kind


def filled(opening: bytes, part: bytes, closing: bytes) -> bytes:
    return opening + part * ((SIZE - len(opening) - len(closing)) // len(part)) + closing


def of_many_keys() -> bytes:
    return b"{" + b",".join(b'"%06d":0' % number for number in range(SIZE // 12)) + b',"x":0}'


def kinds() -> Iterator[tuple[str, bytes]]:
    yield "nested arrays", b"[" * (SIZE // 2) + b"]" * (SIZE // 2)
    yield "nested objects", filled(b"", b'{"a":', b"")
    yield "zeros", filled(b"[", b"0,", b"0]")
    yield "empty arrays", filled(b"[", b"[],", b"0]")
    yield "empty objects", filled(b"[", b"{},", b"0]")
    yield "nulls", filled(b"[", b"null,", b"0]")
    yield "small strings", filled(b"[", b'"ab",', b"0]")
    yield "a long string", filled(b'{"x":"', b"a", b'"}')
    yield "a long key", filled(b'{"', b"a", b'":0}')
    yield "many keys", of_many_keys()
    yield "a long number", filled(b'{"x":', b"9", b"}")
    yield "surrogate escapes", filled(b'{"x":"', rb"\ud83d\ude00", b'"}')
    yield "halves of pairs", filled(b'{"x":"', rb"\ud83d", b'"}')
    yield "whitespace", filled(b'{"x":', b" ", b"0}")
    yield "a long key and zeros", filled(b'{"' + b"k" * 50_000 + b'":[', b"0,", b'0],"x":"\\ud83d\\ude00"}')
    yield "as many elements as may be", b'{"x":[' + b"{}," * 130_000 + b'0],"y":"\\ud83d"}'


@dataclass
class Running:
    """A service in a process of its own."""

    pid: int
    http: httpx2.AsyncClient

    def most_mib(self) -> int:
        lines = (line.split() for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == "VmHWM:") // 1024


class Opened(Protocol):
    def __call__(self, folder: Path) -> AbstractAsyncContextManager[Running]: ...


@asynccontextmanager
async def a_mirror(folder: Path) -> AsyncIterator[Running]:
    async with await ServingProcess.start(folder) as mirror:
        yield Running(mirror.process.pid, mirror.http)
        await mirror.end(signal.SIGTERM)


@asynccontextmanager
async def an_agent(folder: Path) -> AsyncIterator[Running]:
    ports = {"BDN_AGENT_PORT": str(free_port()), "BDN_AGENT_DATA_PORT": str(free_port())}
    url = f"http://127.0.0.1:{ports['BDN_AGENT_PORT']}"
    with AgentMirror().running() as mirror:
        async with (
            Program(folder, mirror.url, ports).daemon() as daemon,
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
        ):
            yield Running(daemon.process.pid, http)


async def send(http: httpx2.AsyncClient, method: str, path: str, body: bytes) -> httpx2.Response:
    async with asyncio.timeout(120):
        return await http.request(method, path, content=body, headers={"Content-Type": "application/json"})


def check_refused(answer: httpx2.Response, what: str) -> None:
    assert 400 <= answer.status_code < 500, (what, answer.status_code, answer.text[:300])
    assert set(json.loads(answer.content)["error"]) == {"code", "message", "retryable", "details"}, what
    assert len(answer.content) < 100_000, what


@pytest.mark.parametrize("service", [a_mirror, an_agent], ids=["mirror", "agent"])
async def test_a_body_of_any_kind_and_of_the_greatest_size__is_refused_in_little_memory(
    service: Opened, tmp_path: Path, tally: Tally
) -> None:
    async with service(tmp_path / "data") as running:
        document = (await running.http.get("/openapi.json")).json()
        routes = list(taking_bodies(document))
        for method, path in routes:  # what is loaded late is loaded now
            await send(running.http, method, path, b'{"x":0}')
        before = running.most_mib()
        for number, (kind, body) in enumerate(kinds()):
            assert len(body) <= SIZE + 64, kind
            chosen = routes[number % EVERY :: EVERY]
            for method, path in chosen:
                check_refused(await send(running.http, method, path, body), f"{kind} to {method} {path}")
            tally.add(scenarios=len(chosen), refused=len(chosen))
        assert running.most_mib() - before < MOST_MIB


@pytest.mark.parametrize("service", [a_mirror, an_agent], ids=["mirror", "agent"])
async def test_a_value_beyond_its_bound__is_refused(service: Opened, tmp_path: Path, tally: Tally) -> None:
    async with service(tmp_path / "data") as running:
        document = (await running.http.get("/openapi.json")).json()
        for one in Bounds(document).requests():
            answer = await send(running.http, one.method, one.path, one.body)
            what = f"{one.what} to {one.method} {one.path}"
            if one.is_beyond:
                check_refused(answer, what)
                # The bound refuses the request, and no later check of its push, grant or source. Pulls refuse this caller before.
                codes = {"UNAUTHENTICATED"} if one.path.startswith("/pulls") else {"INVALID_REQUEST", "LIMIT_EXCEEDED"}
                assert answer.json()["error"]["code"] in codes, (what, answer.text[:300])
            else:  # what is wrong with it is something else than this bound: nobody has its push or its grant
                assert answer.status_code < 500, (what, answer.text[:300])
            tally.add(scenarios=1, refused=int(one.is_beyond))


def taking_bodies(document: Any) -> Iterator[tuple[str, str]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                yield method, path.replace("{", "").replace("}", "")
