"""An agent in this process behind its control API, and a peer that asks it for chunks, as agents ask one another."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from bdn.core.chunk import Digest, digest_of
from bdn.core.layout import Manifest
from bdn.net.api_clients import AgentClient
from bdn.net.api_server import serving
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from node_agent.api import build_app, unix_socket
from node_agent.app import Agent
from tests.support.agent.rig import Rig
from tests.support.content.readers import read_named


@dataclass(frozen=True)
class Site:
    """An agent, our own client of it, and a plain HTTP client."""

    agent: Agent
    client: AgentClient
    http: httpx2.AsyncClient


@asynccontextmanager
async def serving_agent(rig: Rig, **changes: Any) -> AsyncIterator[Site]:
    path = rig.root / "agent.sock"
    async with rig.agent(**changes) as agent:
        with unix_socket(path) as listener:
            async with (
                serving(build_app(agent), listener),
                AgentClient(f"unix:{path}") as client,
                httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(path)), base_url="http://agent") as http,
            ):
                yield Site(agent, client, http)


async def ask(
    pool: ConnectionPool,
    port: int,
    chunk: bytes | Digest,
    grant: str | None,
    manifest: Manifest | None = None,
    size: int = 0,
    *,
    is_suspect: bool = False,
) -> bytes:
    """What a peer gets. ``size`` is the length of a chunk that is given by its name, or of another one's buffer."""
    digest = chunk if isinstance(chunk, Digest) else digest_of(chunk)
    size = size or (len(chunk) if isinstance(chunk, bytes) else 0)
    reader = HttpChunkReader(
        pool, f"http://127.0.0.1:{port}", grant, manifest.digest if manifest else None, is_suspect=is_suspect
    )
    # Not the loop's own threads: the agent in this process needs them to answer.
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, read_named, reader, digest, size)
