"""An agent in this process, behind its control API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from bdn.net.api_server import serving
from bdn.net.client import AgentClient
from node_agent.api import build_app, unix_socket
from node_agent.app import Agent
from tests.support.agent.rig import Rig


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
