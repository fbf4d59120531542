"""What an API's server parses of a request, and when: its head at once, its body once the application asks for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from bdn.core.errors import UnauthenticatedError
from bdn.net.api_server import bind_tcp, new_service, serving
from bdn.wire.http_fields import bearer_of
from tests.support.network.service import Order, new_app

LIMIT = 100_000
BODY = b'{"what": "tea", "count":2}'
ORDER = b"POST /orders HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 26\r\n\r\n" + BODY
PIECES = b"POST /orders HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
KNOWN = b"Authorization: Bearer a\r\n"
LIST = b"GET /orders?limit=2 HTTP/1.1\r\nHost: a\r\n\r\n"


async def slowly(head: HTTPConnection) -> str:
    """Knows each caller that has a bearer, some turns of the loop later."""
    await asyncio.sleep(0.01)
    bearer = bearer_of(head.headers.get("authorization"))
    if bearer is None:
        raise UnauthenticatedError
    return bearer


@asynccontextmanager
async def service() -> AsyncIterator[int]:
    app, listener = new_service("orders", limit_request_bytes=LIMIT, authenticate=slowly), bind_tcp("127.0.0.1", 0)

    @app.post("/orders")
    async def place(order: Order) -> Order:
        return order

    async with serving(app, listener):
        yield listener.getsockname()[1]


@contextmanager
def closed(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.close()


async def answers_of(port: int, *parts: bytes, count: int = 1) -> list[tuple[int, bytes]]:
    """Statuses and bodies of the answers to what is sent in these parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closed(writer):
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            return [await answer_of(reader) for _ in range(count)]


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:] if line)
    length = int(fields.get(b"content-length", -1))  # none: to the end of the connection
    return int(head.split()[1]), await (reader.read() if length < 0 else reader.readexactly(length))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = bind_tcp("127.0.0.1", 0)
    async with serving(new_app(), listener):
        yield listener.getsockname()[1]


async def test_body_of_an_unknown_caller__is_not_parsed() -> None:
    """It is no body at all, of which the parser would say so."""
    async with service() as port:
        ((status, _),) = await answers_of(port, PIECES + b"\r\n" + b"no size of a piece\r\n" * 100)
        assert status == 401
        ((status, _),) = await answers_of(port, PIECES + KNOWN + b"\r\n" + b"no size of a piece\r\n" * 100)
        assert status == 400


async def test_body_of_a_refused_caller__is_dropped_up_to_the_limit_and_no_further() -> None:
    piece, most, sent = b"10000\r\n" + bytes(65536) + b"\r\n", 256 * 1024 * 1024, 0
    async with service() as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closed(writer), suppress(ConnectionError):
            writer.write(PIECES + b"\r\n")
            assert (await answer_of(reader))[0] == 401
            while sent < most:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        assert sent < most // 4  # what both sockets hold


async def test_body_in_pieces_of_one_byte__is_parsed_a_little_at_once() -> None:
    sizes = list[int]()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            sizes.append(len(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    listener = bind_tcp("127.0.0.1", 0)
    async with serving(app, listener):
        pieces = b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"
        assert await answers_of(listener.getsockname()[1], PIECES + b"\r\n" + pieces) == [(200, b"")]
    assert sum(sizes) <= 20_000
    assert max(sizes) < 2000


async def test_body_in_pieces__is_read_whole() -> None:
    async with service() as port:
        for step in (1, 7, 26):
            pieces = b"".join(
                b"%x\r\n%b\r\n" % (len(BODY[at : at + step]), BODY[at : at + step]) for at in range(0, 26, step)
            )
            request = PIECES + KNOWN + b"\r\n" + pieces + b"0\r\n\r\n"
            ((status, body),) = await answers_of(port, request)
            assert (status, body) == (200, b'{"what":"tea","count":2}')


async def test_request__may_be_split_anywhere(port: int) -> None:
    for at in range(1, len(ORDER)):
        assert await answers_of(port, ORDER[:at], ORDER[at:]) == [(200, b'{"what":"tea","count":2}')]
    assert await answers_of(port, *(ORDER[at : at + 1] for at in range(len(ORDER)))) == [
        (200, b'{"what":"tea","count":2}')
    ]


async def test_requests_that_come_together__are_answered_in_order(port: int) -> None:
    expected = [(200, b'{"what":"tea","count":2}'), (200, b"[0,1]")] * 3
    assert await answers_of(port, (ORDER + LIST) * 3, count=6) == expected
    everything = (ORDER + LIST) * 3
    for size in (1, 50, 130):
        parts = [everything[at : at + size] for at in range(0, len(everything), size)]
        assert await answers_of(port, *parts, count=6) == expected
