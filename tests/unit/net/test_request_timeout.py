"""A control plane hangs up on whoever does not finish a request in time, and on nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bdn.net.api_server.http_server import TimedProtocol
from tests.support.network.service import listening, new_app

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
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_second_request_has_its_own_time(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(HEAD + BODY)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(24) == b'{"what":"tea","count":2}'
        await asyncio.sleep(0.2)  # longer than a request may take, all in all
    writer.write(b"GET /ord")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
