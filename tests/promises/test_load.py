"""A thousand askers at once cost one read of the upstream, nobody is turned away, and nobody who leaves is remembered."""

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bdn.core.pace.retry import StallPolicy
from bdn.mirror.api import routes
from bdn.net.api_server import TimedProtocol, bind_tcp, serving
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import noise
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
