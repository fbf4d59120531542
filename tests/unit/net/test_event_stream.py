"""Server-sent events for clients that read, that leave, and that do neither."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx2
import pytest
from fastapi import FastAPI

from bdn.net import api_server
from bdn.net.api_server import EVENTS, EventStream
from tests.support.network.service import Order, client_of, listening, new_app

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
        return EventStream(told(), lambda order: order.count == 3)

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
async def test_what_is_under_way_for_a_listener_that_leaves_ends_in_order() -> None:
    is_in_order = asyncio.Event()

    async def looking() -> AsyncGenerator[Order]:
        try:
            yield Order(what="tea", count=1)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # as a connection to the database is given back
            is_in_order.set()

    async with client_of(app_of(looking)) as client, asyncio.timeout(10):
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
