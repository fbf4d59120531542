"""A thousand askers at once cost one read of the upstream, nobody is turned away, and nobody who leaves is remembered."""

import asyncio
import gc
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import httpx2
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bdn.core.pace.retry import StallPolicy
from bdn.mirror.api import routes
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.net.api_server import TimedProtocol, bind_tcp, serving
from node_agent.app import Agent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import MIB, Rig, noise
from tests.support.content.trees import tree
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until
from tests.support.promises.tally import Tally, at_scale

pytestmark = [pytest.mark.promise("load"), pytest.mark.usefixtures("backend")]
pytest_plugins = ("tests.support.mirror.fixtures",)

DISTINCT: Final = 10
SMALL_BUFFER: Final = 4096  # of a socket; Linux makes it a little more
MOST_UNREAD: Final = 512 * 1024  # of one listener: what uvicorn buffers, and both sockets
_HELD_UP_SECONDS: Final = 0.3


@pytest.fixture
async def mirror(upstreams: None, database_options: dict[str, Any], tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", serve=True, **database_options) as mirror:
        yield mirror


async def test_a_thousand_requests_for_ten_sources_are_ten_mirrors(
    mirror: MirrorUnderTest, hub: Hub, tally: Tally
) -> None:
    count = at_scale(200, 1000)
    contents = {f"org/model-{number}": {"w.bin": noise(100_000, number)} for number in range(DISTINCT)}
    for name, files in contents.items():
        hub.repo(name).commit(files)
    hub.fail(stall(), "w.bin", times=None)  # nothing is READY before all have asked: what is READY is not joined

    answers = await asyncio.gather(
        *(mirror.post(source(f"hf://org/model-{number % DISTINCT}")) for number in range(count))
    )
    statuses = Counter(answer.status_code for answer in answers)
    ids = {answer.json()["id"] for answer in answers if answer.status_code == 202}
    hub.release_stalled()
    ended = [await mirror.ended(mirror_id) for mirror_id in ids]

    tally.add(scenarios=count, lost=sum(one["status"] != "READY" for one in ended))
    assert statuses == {202: count}
    assert len(ids) == DISTINCT
    trees = [await mirror.tree(one["sources"][0]["manifest"]) for one in ended]
    tally.add(wrong=sum(found not in contents.values() for found in trees))
    served = hub.log.bytes_served("w.bin", origin="cdn")
    assert served == sum(len(files["w.bin"]) for files in contents.values())


async def test_many_listeners_share_one_look_and_all_hear_the_end(
    upstreams: None, tmp_path: Path, hub: Hub, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of them vanishes in the middle."""
    count = at_scale(100, 500)
    looks = _counted_looks(monkeypatch)
    hub.repo("org/model").commit({"w.bin": noise(100_000)})
    hub.fail(stall(), "w.bin", times=None)
    async with mirror_under_test(tmp_path / "mirror") as mirror, AsyncExitStack() as stack:
        mirror_id = (await mirror.begin(source("hf://org/model")))["id"]
        port = await _listening(stack, mirror)
        listeners = [Listener() for _ in range(count)]
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.listen(port, mirror_id)) for one in listeners]
            await until(lambda: all(one.heard for one in listeners), "every listener's first event")
            before, begun = looks.total(), sum(one.heard for one in listeners)
            await until(lambda: all(one.heard >= 3 for one in listeners), "two more events for everybody")
            asked, told = looks.total() - before, sum(one.heard for one in listeners) - begun
            for task in tasks[: count // 10]:
                task.cancel()
            hub.release_stalled()
        stayed = listeners[count // 10 :]
        service = mirror.service

        tally.add(scenarios=count, lost=sum(one.last != "done" for one in stayed))
        assert told >= 10 * asked, "they share their looks"
        await until(lambda: not len(service.requests.watched), "everybody is forgotten")
        gc.collect()
        assert mirror_id not in service.watch.names()


async def test_listeners_that_never_read_cost_a_bounded_buffer_each_and_delay_nobody(
    upstreams: None,
    tmp_path: Path,
    hub: Hub,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They ask for the events and leave them lying: their generators stand still, and one who reads hears it all."""
    count = at_scale(30, 100)
    monkeypatch.setattr(routes, "_EVENT_SECONDS", 0.001)
    monkeypatch.setattr(TimedProtocol, "slowest", StallPolicy(window_seconds=3600))  # until then all of them are there
    hub.repo("org/model").commit({"w.bin": noise(100_000)})
    hub.fail(stall(), "w.bin", times=None)
    async with mirror_under_test(tmp_path / "mirror") as mirror, AsyncExitStack() as stack:
        mirror_id = (await mirror.begin(source("hf://org/model")))["id"]
        sent = Sent(mirror.service.api)
        listener = bind_tcp("127.0.0.1", 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        await stack.enter_async_context(serving(cast("FastAPI", sent), listener))
        port = int(listener.getsockname()[1])
        deaf = [await stack.enter_async_context(_deaf(port, mirror_id)) for _ in range(count)]
        async with asyncio.timeout(120):
            await until(lambda: len(sent.waiting) == count, "every one of them is waited for", seconds=60)
            reading = Listener()
            async with asyncio.TaskGroup() as group:
                task = group.create_task(reading.listen(port, mirror_id))
                await until(lambda: reading.heard >= 20, "twenty events for the one who reads")
                hub.release_stalled()
                await task
        most = max(sent.bytes.values())
        for one in deaf:
            one.close()

        tally.add(scenarios=count + 1, lost=reading.last != "done")
        assert most < MOST_UNREAD
        await until(lambda: not len(mirror.service.requests.watched), "everybody is forgotten")
    assert "Traceback" not in caplog.text


async def test_agents_that_ask_all_at_once_cost_the_upstream_one_read(
    upstreams: None, tmp_path: Path, hub: Hub, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred agents ask for one of twenty manifests each, all of them at the same moment, of a mirror in its own process."""
    agents_count, manifests_count = at_scale(6, 100), at_scale(3, 20)
    contents = [{"w.bin": noise(MIB + number, number), "c.json": b"%d" % number} for number in range(manifests_count)]
    for number, files in enumerate(contents):
        hub.repo(f"org/model-{number}").commit(files)
    statuses = counted_answers(monkeypatch)
    async with await ServingProcess.start(tmp_path / "mirror") as mirror, AsyncExitStack() as stack:
        begun = [await mirror.begin(source(f"hf://org/model-{number}")) for number in range(manifests_count)]
        ready = [await mirror.ended(mirror_id) for mirror_id in begun]
        agents = [
            await stack.enter_async_context(_agent(tmp_path / f"node-{number}", mirror.url))
            for number in range(agents_count)
        ]
        async with asyncio.timeout(240):
            asking = [_staged(agent, ready[number % manifests_count]["grant"]) for number, agent in enumerate(agents)]
            paths = await asyncio.gather(*asking)
        trees = [tree(path) for path in paths]

        wrong = [number for number, found in enumerate(trees) if found != contents[number % manifests_count]]
        tally.add(scenarios=agents_count, wrong=len(wrong))
        assert hub.log.bytes_served("w.bin", origin="cdn") == sum(len(files["w.bin"]) for files in contents)
        assert statuses.total() > agents_count
        assert not [status for status in statuses if status >= 500], statuses


def counted_answers(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The statuses of all answers that asyncio's clients of this process get from now on."""
    statuses: Counter[int] = Counter()
    real = httpx2.AsyncClient.send

    async def send(self: httpx2.AsyncClient, *given: Any, **options: Any) -> httpx2.Response:
        answer = await real(self, *given, **options)
        statuses[answer.status_code] += 1
        return answer

    monkeypatch.setattr(httpx2.AsyncClient, "send", send)
    return statuses


class Sent:
    """Wraps an application: bytes that each stream has given away, and the streams that are held up in it."""

    def __init__(self, app: ASGIApp) -> None:
        self.bytes: Counter[int] = Counter()
        self.waiting: set[int] = set()
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)

        async def note(message: Message) -> None:
            self.bytes[number] += len(message.get("body", b""))
            held_up = asyncio.get_running_loop().call_later(_HELD_UP_SECONDS, self.waiting.add, number)
            await send(message)
            held_up.cancel()
            self.waiting.discard(number)

        await self._app(scope, receive, note)


class Listener:
    """One reader of a mirror's events, as cheap as can be."""

    def __init__(self) -> None:
        self.heard = 0
        self.last = ""

    async def listen(self, port: int, mirror_id: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"GET /mirror/{mirror_id}/events HTTP/1.1\r\nHost: mirror\r\n\r\n".encode())
            while self.last != "done" and (line := await reader.readline()):
                if line.startswith(b"event: "):
                    self.last = line.removeprefix(b"event: ").strip().decode()
                    self.heard += 1
        finally:
            writer.transport.abort()


@asynccontextmanager
async def _deaf(port: int, mirror_id: str) -> AsyncIterator[socket.socket]:
    """Asks for a mirror's events and reads none."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        one.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, ("127.0.0.1", port))
        await loop.sock_sendall(one, f"GET /mirror/{mirror_id}/events HTTP/1.1\r\nHost: mirror\r\n\r\n".encode())
        yield one


def _counted_looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    looks: Counter[str] = Counter()
    real = MirrorRequests.get

    async def counted(self: MirrorRequests, mirror_id: str, *given: Any) -> Any:
        looks[mirror_id] += 1
        return await real(self, mirror_id, *given)

    monkeypatch.setattr(MirrorRequests, "get", counted)
    return looks


async def _listening(stack: AsyncExitStack, mirror: MirrorUnderTest) -> int:
    listener = bind_tcp("127.0.0.1", 0)
    await stack.enter_async_context(serving(mirror.service.api, listener))
    return int(listener.getsockname()[1])


@asynccontextmanager
async def _agent(root: Path, url: str) -> AsyncIterator[Agent]:
    async with Rig(AgentMirror(), root, {"url": url, "node": root.name, "byte_threads": 2}).agent() as agent:
        await agent.heartbeats.beat()
        yield agent


async def _staged(agent: Agent, grant: str) -> Path:
    begun = await agent.stages.start("job", grant)
    document = await agent.stages.finish(begun.record.id)
    return Path(str(document.mounts[0].path))
