"""An API with more clients than places: strangers make room, callers that are known keep theirs, and no organisation has them all."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import HTTPConnection

from bdn.core.errors import UnauthenticatedError
from bdn.net.api_server import bind_tcp, new_service, serving
from bdn.net.tls import Certificate
from bdn.wire.http_fields import bearer_of
from tests.support.mirror.service import until
from tests.support.network.authority import new_authority

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def organisation(head: HTTPConnection) -> str:
    """Each bearer is its own organisation."""
    bearer = bearer_of(head.headers.get("authorization"))
    if bearer is None:
        raise UnauthenticatedError
    return bearer


@dataclass
class Busy:
    """A service with one route that waits until ``released``, for known and unknown callers alike."""

    released: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    port: int = 0

    def app(self) -> FastAPI:
        app = new_service("busy", limit_request_bytes=100, authenticate=organisation)

        @app.get("/waiting")
        async def wait() -> str:
            self.waiting += 1
            await self.released.wait()
            return "done"

        @app.get("/now")
        async def now() -> str:
            return "done"

        return app

    async def connect(self, stack: AsyncExitStack, **options: Any) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        stack.callback(writer.close)
        return reader, writer

    async def known(self, stack: AsyncExitStack, bearer: str) -> Client:
        """A connection with an answered request of an organisation."""
        client = await self.connect(stack)
        assert await asked(client, "/now", bearer) == 200
        return client

    async def at_work(self, stack: AsyncExitStack, bearer: str) -> Client:
        """A connection with a request of an organisation that waits."""
        before, client = self.waiting, await self.connect(stack)
        send(client, "/waiting", bearer)
        await until(lambda: self.waiting > before)
        return client


@asynccontextmanager
async def busy(connections: int, certificate: Certificate | None = None) -> AsyncIterator[Busy]:
    listener, service = bind_tcp("127.0.0.1", 0), Busy()
    service.port = listener.getsockname()[1]
    async with asyncio.timeout(60), serving(service.app(), listener, certificate=certificate, connections=connections):
        try:
            yield service
        finally:
            service.released.set()


def send(client: Client, path: str, bearer: str | None = None) -> None:
    authorization = "" if bearer is None else f"Authorization: Bearer {bearer}\r\n"
    client[1].write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n".encode())


async def status_of(client: Client) -> int:
    """Of the next answer; 0 when the connection has ended."""
    try:
        head = await client[0].readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:] if line)
    await client[0].readexactly(int(fields[b"content-length"]))
    return int(head.split()[1])


async def asked(client: Client, path: str, bearer: str | None = None) -> int:
    send(client, path, bearer)
    return await status_of(client)


async def has_ended(client: Client) -> bool:
    try:
        return await client[0].read(1) == b""
    except ConnectionError:
        return True


async def test_api_at_its_limit__closes_the_oldest_stranger_for_a_newcomer() -> None:
    async with busy(16) as service, AsyncExitStack() as stack:
        crowd = [await service.connect(stack) for _ in range(20)]
        for client in crowd[:4]:
            assert await has_ended(client)
        assert await asked(await service.connect(stack), "/now", "b") == 200
        assert await asked(crowd[-1], "/now", "b") == 200


async def test_api__closes_strangers_whatever_they_wait_for(subtests: pytest.Subtests) -> None:
    begun = {
        "half a head": b"GET /now HTTP/1.1\r\nHost:",
        "a body that does not come": b"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        "an answer": b"GET /waiting HTTP/1.1\r\nHost: x\r\n\r\n",
    }
    for name, request in begun.items():
        with subtests.test(name):
            async with busy(16) as service, AsyncExitStack() as stack:
                for _ in range(40):
                    _, writer = await service.connect(stack)
                    writer.write(request)
                assert await asked(await service.connect(stack), "/now", "b") == 200


async def test_api__keeps_known_callers_while_strangers_come_and_go() -> None:
    async with busy(64) as service, AsyncExitStack() as stack:
        idle, at_work = await service.known(stack, "a"), await service.at_work(stack, "a")
        for _ in range(100):
            await service.connect(stack)
        assert await asked(idle, "/now", "a") == 200
        service.released.set()
        assert await status_of(at_work) == 200


async def test_strangers_of_one_address__make_room_for_their_own_alone() -> None:
    async with busy(64) as service, AsyncExitStack() as stack:
        others = [await service.connect(stack, local_addr=("127.0.0.3", 0)) for _ in range(10)]
        for _ in range(100):
            await service.connect(stack, local_addr=("127.0.0.2", 0))
        for client in others:
            assert await asked(client, "/now", "b") == 200


async def test_organisation_with_all_connections__loses_its_oldest_idle_one() -> None:
    async with busy(16) as service, AsyncExitStack() as stack:
        crowd = [await service.known(stack, "a") for _ in range(13)]
        assert await has_ended(crowd[0])
        assert await asked(await service.connect(stack), "/now", "b") == 200
        assert await asked(crowd[-1], "/now", "a") == 200


async def test_organisation_with_too_many_connections_at_work__is_refused_and_others_are_served() -> None:
    async with busy(16) as service, AsyncExitStack() as stack:
        crowd = [await service.at_work(stack, "a") for _ in range(12)]
        refused = await service.connect(stack)
        assert await asked(refused, "/now", "a") == 503
        assert await has_ended(refused)
        assert await asked(await service.connect(stack), "/now", "b") == 200
        service.released.set()
        assert [await status_of(client) for client in crowd] == [200] * 12


async def test_api_whose_connections_are_all_at_work__hangs_up_on_a_newcomer() -> None:
    async with busy(2) as service, AsyncExitStack() as stack:
        crowd = [await service.at_work(stack, bearer) for bearer in "ab"]
        assert await has_ended(await service.connect(stack))
        service.released.set()
        assert [await status_of(client) for client in crowd] == [200, 200]


async def test_api_over_tls__counts_connections_whose_handshake_does_not_end(tmp_path: Path) -> None:
    authority = new_authority(tmp_path, "unused")
    shown = Certificate("BDN_TLS", *authority.issue(tmp_path, "localhost", "127.0.0.1"))
    async with busy(16, shown) as service, AsyncExitStack() as stack:
        crowd = [await service.connect(stack) for _ in range(40)]
        for client in crowd[:24]:
            assert await has_ended(client)
        trusting = ssl.create_default_context(cafile=authority.certificates)
        newcomer = await service.connect(stack, ssl=trusting, server_hostname="localhost")
        assert await asked(newcomer, "/now", "b") == 200
