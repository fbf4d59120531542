"""An API's server: where it listens, how long it waits for a request, its events, its shortages, and how it ends."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from typing import cast

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from bdn.core.errors import InUseError, InvalidRequestError
from bdn.core.pace.retry import StallPolicy
from bdn.net import api_server
from bdn.net.api_server import (
    EVENTS,
    EventStream,
    TimedProtocol,
    bind_tcp,
    document_events,
    log_shortages,
    new_service,
    queued_bytes,
    serving,
)
from bdn.net.chunk_server.messages import HEAD_LIMIT
from bdn.net.request_bodies import UNTIMED
from bdn.wire.grants import LONGEST_GRANT
from tests.support.mirror.service import until
from tests.support.network.service import Order, anybody, client_of, listening, new_app


def test_a_port_that_is_taken_is_in_use() -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InUseError, match=f"port {port} of 127.0.0.1 is in use by another process"):
            bind_tcp("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot listen on {host} port 8460"):
        bind_tcp(host, 8460)


async def test_the_port_is_free_again_after_the_block() -> None:
    listener = bind_tcp("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with serving(new_app(), listener), httpx2.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/orders")).status_code == 200
    assert listener.fileno() == -1
    bind_tcp("127.0.0.1", port).close()


async def test_an_error_of_the_block_is_raised_alone_and_ends_the_server() -> None:
    listener = bind_tcp("127.0.0.1", 0)
    with pytest.raises(LookupError, match="of the block"):
        async with serving(new_app(), listener):
            raise LookupError("of the block")
    assert listener.fileno() == -1


async def test_a_canceled_block_ends_the_server_in_order() -> None:
    app = new_service("slow", limit_request_bytes=100, authenticate=anybody)
    entered, asked, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        asked.set()
        await release.wait()
        return "done"

    listener = bind_tcp("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/slow"

    async def serve() -> None:
        async with serving(app, listener):
            entered.set()
            await asyncio.Event().wait()

    async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
        task = asyncio.create_task(serve())
        answer = asyncio.create_task(client.get(url))
        await entered.wait()
        await asked.wait()
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()  # it waits for the answer that is under way
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await answer).json() == "done"
    assert listener.fileno() == -1


async def test_signals_stay_with_the_program() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with listening(new_app()):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


class _Short(socket.socket):
    """It takes no connection: the process has no descriptor for it."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_server_that_ends_in_a_shortage_is_silent_about_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.1)
    listener = _Short()
    listener.bind(("127.0.0.1", 0))
    async with serving(FastAPI(), listener):
        with socket.create_connection(listener.getsockname()):
            await until(lambda: caplog.records)
    await asyncio.sleep(0.2)  # until each place of the backlog has tried again
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "new connections have to wait: Too many open files; raise the limit of open files (ulimit -n)"
    ]


async def test_other_errors_of_callbacks_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    def wrong() -> None:
        raise ValueError("of somebody else")

    log_shortages()
    log_shortages()  # another server in this loop
    asyncio.get_running_loop().call_soon(wrong)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.exc_info
    assert str(record.exc_info[1]) == "of somebody else"


HEAD = b"POST /orders HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 26\r\n\r\n"
BODY = b'{"what": "tea", "count":2}'


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(TimedProtocol, "request_seconds", 0.3)
    async with listening(new_app()) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize("begun", [b"", b"GET /ord", HEAD[:-2], HEAD, HEAD + BODY[:-1]])
async def test_who_says_half_a_request_is_hung_up_on(port: int, begun: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_second_request_has_its_own_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedProtocol, "request_seconds", 2.0)  # a busy machine answers each by then
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for pause in (2.1, 0):  # longer than one request may take
        writer.write(HEAD + BODY)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(24) == b'{"what":"tea","count":2}'
        await asyncio.sleep(pause)
    writer.write(b"GET /ord")
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_body_whose_pace_another_application_judges__has_no_other_time_and_the_next_request_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][UNTIMED]()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(TimedProtocol, "request_seconds", 1.0)
    app = new_service("slow", limit_request_bytes=1, authenticate=anybody, others={"/slow/": slow})
    async with listening(app) as url, asyncio.timeout(60):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        timed, other = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer), closing(other):
            writer.write(b"PUT /slow/x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\nha")
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
            assert await timed.read() == b""  # so a request's time is over
            timed, again = await asyncio.open_connection("127.0.0.1", port)
            with closing(again):
                assert await timed.read() == b""
            writer.write(b"lf")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET /ord")
            assert await reader.read() == b""


# --- server-sent events ---


LARGE = "x" * 10_000
SMALL_BUFFER = 4096


class Told:
    """Documents until ``count`` were told, or without an end, and whether whoever told them has ended."""

    def __init__(self, count: int | None, what: str) -> None:
        self.given = 0
        self.ended = asyncio.Event()
        self._count = count
        self._what = what

    async def __call__(self) -> AsyncGenerator[Order]:
        try:
            while self.given != self._count:
                self.given += 1
                yield Order(what=self._what, count=self.given)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


def app_of(told: Callable[[], AsyncGenerator[Order]]) -> FastAPI:
    app = new_app()

    @app.get("/events", status_code=200, response_class=EventStream, responses=EVENTS)
    async def events() -> EventStream:
        return EventStream(document_events(told(), lambda order: order.count == 3))

    return app


async def test_the_last_document_is_called_done() -> None:
    told = Told(3, "tea")
    async with client_of(app_of(told)) as client:
        answer = await client.get("/events")
        described = (await client.get("/openapi.json")).json()["paths"]["/events"]["get"]["responses"]["200"]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.split("\n\n") == [
        'event: progress\ndata: {"what":"tea","count":1}',
        'event: progress\ndata: {"what":"tea","count":2}',
        'event: done\ndata: {"what":"tea","count":3}',
        "",
    ]
    assert described["content"]["text/event-stream"]["itemSchema"]["properties"]["event"] == {
        "enum": ["progress", "done"]
    }


@pytest.fixture
async def deaf() -> AsyncIterator[socket.socket]:
    """A client that leaves what it gets lying."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        one.setblocking(False)
        yield one


async def held_up(deaf: socket.socket, url: str, told: Told) -> None:
    """It asks for the events, and both sockets are full."""
    loop, before = asyncio.get_running_loop(), -1
    await loop.sock_connect(deaf, ("127.0.0.1", int(url.rpartition(":")[2])))
    await loop.sock_sendall(deaf, b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
    while before != told.given:
        before = told.given
        await asyncio.sleep(0.2)


@pytest.mark.promise("hostile-input")
async def test_a_listener_that_leaves_while_it_is_held_up_ends_the_stream_and_is_no_error(
    deaf: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(None, LARGE)
    async with listening(app_of(told)) as url, asyncio.timeout(30):
        await held_up(deaf, url, told)
        deaf.close()
        await told.ended.wait()

    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.promise("hostile-input")
async def test_a_client_that_takes_less_of_an_answer_than_it_may_is_let_go(
    deaf: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open for its answer is closed: 32 of them had held all places in which a mirror reads from its bucket."""
    monkeypatch.setattr(TimedProtocol, "slowest", StallPolicy(window_seconds=0.2))
    told = Told(None, LARGE)
    async with listening(app_of(told)) as url, asyncio.timeout(30):
        await held_up(deaf, url, told)
        await told.ended.wait()


class Reader(asyncio.Transport):
    """A client's side of a connection: what waits in our socket is real, what waits above it a number. A test makes the loop's calls."""

    def __init__(self, unread: int = 0) -> None:
        super().__init__()
        with closing(bind_tcp("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.server.setblocking(False)
        self.unread = unread
        self.is_aborted = self.is_closed = False
        self.calls: list[asyncio.TimerHandle] = []

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.server if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def call_later(self, seconds: float, call: Callable[..., None], *given: object) -> asyncio.TimerHandle:
        self.calls.append(asyncio.TimerHandle(seconds, call, given, asyncio.get_running_loop()))
        return self.calls[-1]

    def fill(self) -> None:
        """As much as both kernels take."""
        with suppress(BlockingIOError):
            while True:
                self.server.send(bytes(65536))

    async def take(self, least: int) -> None:
        """The client reads until so much less waits in our socket."""
        before = queued_bytes(self.server.fileno())
        self.client.setblocking(False)
        while before - queued_bytes(self.server.fileno()) < least:
            with suppress(BlockingIOError):
                self.client.recv(least)
            await asyncio.sleep(0.001)

    def pass_time(self) -> None:
        due, self.calls = self.calls, []
        for one in due:
            if not one.cancelled():
                one._run()

    def ended(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    one = Reader()
    yield one
    one.ended()


def protocol_of(reader: Reader, least: int) -> TimedProtocol:
    """One that lets clients go which take less than that in a window."""
    config = uvicorn.Config(new_app(), log_config=None)
    config.load()
    protocol = TimedProtocol(config, uvicorn.server.ServerState(), {}, _loop=cast("asyncio.AbstractEventLoop", reader))
    protocol.transport = reader
    protocol.flow = FlowControl(reader)
    protocol.slowest = StallPolicy(least_bytes=least)
    return protocol


@pytest.mark.promise("hostile-input")
async def test_a_client_that_takes_enough_of_an_answer_in_each_window_is_waited_for(reader: Reader) -> None:
    """By what its kernel has taken of ours: our socket takes nothing more before a third of it is free."""
    least = 10_000
    protocol = protocol_of(reader, least)
    reader.fill()
    reader.unread = 2**20
    protocol.pause_writing()
    for _ in range(3):
        await reader.take(least)
        reader.pass_time()
    assert (reader.is_aborted, len(reader.calls)) == (False, 1)
    protocol.resume_writing()
    reader.pass_time()
    assert (reader.is_aborted, reader.calls) == (False, [])
    protocol.pause_writing()
    reader.pass_time()
    assert (reader.is_aborted, reader.calls) == (True, [])


@pytest.mark.promise("hostile-input")
async def test_over_tls_what_waits_to_be_sent_below_it_counts_too(reader: Reader) -> None:
    least = 10_000
    protocol = protocol_of(reader, least)
    below = Reader(10 * least)
    protocol.below = below
    reader.unread = 2**20
    protocol.pause_writing()
    for _ in range(3):
        below.unread -= least
        reader.pass_time()
    seen = [reader.is_aborted]
    reader.pass_time()
    assert [*seen, reader.is_aborted] == [False, True]
    below.ended()


@pytest.mark.promise("hostile-input")
async def test_a_connection_is_idle_once_its_last_answer_was_taken_and_no_sooner(reader: Reader) -> None:
    """One that takes nothing more is let go."""
    least = 10_000
    protocol = protocol_of(reader, least)
    reader.unread = 2 * least
    protocol.timeout_keep_alive_handler()
    reader.unread -= least
    reader.pass_time()
    assert (reader.is_closed, reader.is_aborted) == (False, False)
    reader.unread = 0
    reader.pass_time()
    assert (reader.is_closed, reader.is_aborted) == (True, False)
    reader.is_closed, reader.unread = False, 10
    protocol.timeout_keep_alive_handler()
    reader.pass_time()
    assert reader.is_aborted


@pytest.mark.promise("hostile-input")
async def test_what_is_under_way_for_a_listener_that_leaves_ends_in_order() -> None:
    is_in_order = asyncio.Event()

    async def looking() -> AsyncGenerator[Order]:
        try:
            yield Order(what="tea", count=1)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # as a connection to the database is given back
            is_in_order.set()

    async with client_of(app_of(looking)) as client, asyncio.timeout(60):
        async with client.stream("GET", "/events") as answer:
            await anext(answer.aiter_lines())
        await is_in_order.wait()


@pytest.mark.promise("hostile-input")
async def test_a_service_that_stops_lets_go_of_who_is_held_up_without_a_traceback(
    deaf: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_GRACE_SECONDS", 1)
    told = Told(None, LARGE)
    async with asyncio.timeout(30):
        async with listening(app_of(told)) as url:
            await held_up(deaf, url, told)
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # what the server says, it says last
        assert told.ended.is_set()

    assert "Traceback" not in caplog.text


async def test_what_fails_on_our_side_is_an_error_and_ends_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> AsyncGenerator[Order]:
        yield Order(what="tea", count=1)
        raise LookupError("a bug")

    async with client_of(app_of(failing)) as client:
        with pytest.raises(httpx2.RequestError):
            await client.get("/events")

    assert "a bug" in caplog.text


async def test_the_longest_grant_fits_into_the_head_of_a_request() -> None:
    token = "a" * LONGEST_GRANT
    async with client_of(new_app()) as client:
        answer = await client.get("/bearer", headers={"Authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()) == (200, token)
    assert LONGEST_GRANT + 4096 <= HEAD_LIMIT
