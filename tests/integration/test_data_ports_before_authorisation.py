"""Both data ports, the mirror's and the agent's: a caller without a right costs a head, and no buffer or body."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.net.chunk_server.receiving import ReceiveBuffers
from bdn.wire.http_fields import MANIFEST_HEADER, SUSPECT_HEADER, chunk_path, push_path
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.content.shelves import read_answer
from tests.support.mirror.service import mirror_under_test

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.agent.fixtures")

CHUNK: Final = digest_of(b"a chunk")
CHUNK_PATH: Final = chunk_path(CHUNK)
PUSH_PATH: Final = push_path(f"mir_{'0a' * 12}", CHUNK)
MANIFEST: Final = f"{MANIFEST_HEADER}: {CHUNK}"
BODY: Final = f"Content-Length: {CHUNK_SIZE}"
FORMS: Final = {  # all that a data port takes: bdn.net.chunk_server.connection
    "chunk": (f"GET {CHUNK_PATH}",),
    "size of a chunk": (f"HEAD {CHUNK_PATH}",),
    "part of a chunk": (f"GET {CHUNK_PATH}", "Range: bytes=0-1"),
    "chunk of an owner": (f"GET {CHUNK_PATH}", MANIFEST),
    "suspect": (f"GET {CHUNK_PATH}", f"{SUSPECT_HEADER}: 1"),
    "chunk with a body": (f"GET {CHUNK_PATH}", BODY),
    "manifest": (f"GET /manifests/{CHUNK}", MANIFEST),
    "push of a byte": (f"PUT {PUSH_PATH}", "Content-Length: 1"),
    "push": (f"PUT {PUSH_PATH}", BODY),
    "push that waits": (f"PUT {PUSH_PATH}", BODY, "Expect: 100-continue"),
}
BEARERS: Final = {
    "nothing": (),
    "no grant": ("Authorization: Bearer x",),
    "an unknown token": (f"Authorization: Bearer bdn_{'x' * 43}",),
}
# What is read of a body, so that the answer arrives, and what fits into the sockets of both sides.
MOST_READ: Final = CHUNK_SIZE + 1024 * 1024
MOST_SENT: Final = MOST_READ + 24 * 1024 * 1024


@pytest.fixture(params=["mirror", "agent"])
async def port(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[int]:
    if request.param == "mirror":
        async with mirror_under_test(tmp_path, serve=True, auth="token", token="secret") as mirror:
            assert mirror.service.data_port is not None
            yield mirror.service.data_port
    else:
        with AgentMirror().running() as upstream:
            async with Rig(upstream, tmp_path, {"auth": "token", "cluster_cache_bytes": 1 << 24}).agent() as agent:
                await agent.heartbeats.beat()
                yield agent.data_port


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """For whom a buffer was requested."""
    requested: list[str] = []
    monkeypatch.setattr(ReceiveBuffers, "request", lambda _, organisation: requested.append(organisation))
    yield requested
    assert requested == []


def refusal(port: int, first: str, *headers: str) -> tuple[int, int]:
    """The status, and the bytes of an endless body that went out before the server closed the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join((f"{first} HTTP/1.1", "Host: x", *headers, "", "")).encode())
        status, sent, piece = read_answer_of(connection, first), 0, bytes(64 * 1024)
        with suppress(ConnectionError):
            while BODY in headers and sent <= MOST_SENT:
                sent += connection.send(piece)
        return status, sent


def read_answer_of(connection: socket.socket, first: str) -> int:
    if first.startswith("HEAD"):
        return int(connection.recv(65536).split()[1])
    return read_answer(connection)[0]


@pytest.mark.usefixtures("buffers")
async def test_data_port__reads_and_allocates_nothing_for_a_caller_without_a_right(
    port: int, subtests: pytest.Subtests
) -> None:
    for form, (first, *headers) in FORMS.items():
        for bearer, authorization in BEARERS.items():
            with subtests.test(form, bearer=bearer):
                status, sent = await asyncio.to_thread(refusal, port, first, *headers, *authorization)
                assert status in (401, 403, 404)  # 404: of what this port has not at all
                assert sent <= MOST_SENT
