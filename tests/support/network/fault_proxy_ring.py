"""Agents in this process with a fault proxy on each of their ways: to the mirror's API and data plane, and to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bdn.core.pace.streaming import StallPolicy
from node_agent.app import Agent
from node_agent.fetch.deadlines import Waits
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.ring import Ring
from tests.support.network.fault_proxy import FaultProxy
from tests.support.network.ports import free_port

# A hundredth of the patience in production, so that silence costs a test little.
HASTY: Final = Waits(
    peer_seconds=0.4,
    mirror_seconds=0.4,
    stall=StallPolicy(least_bytes=64 * 1024, window_seconds=0.4),
    document_seconds=(0.4, 0.8),
)


@dataclass
class FaultyRing:
    """``api`` and ``content`` stand before the mirror; ``peers`` has a proxy for each node's data plane."""

    ring: Ring
    api: FaultProxy
    content: FaultProxy
    peers: dict[str, FaultProxy]

    @property
    def mirror(self) -> AgentMirror:
        return self.ring.mirror

    @asynccontextmanager
    async def agent(self, node: str, **changes: Any) -> AsyncIterator[Agent]:
        port = free_port()
        with FaultProxy(("127.0.0.1", port)).running() as proxy:
            self.peers[node] = proxy
            given = {"url": self.api.url, "data_port": port, "advertise": proxy.url, **changes}
            async with self.ring.agent(node, **given) as agent:
                yield agent

    def part_mirror(self, *, is_parted: bool = True) -> None:
        """Nobody sees the mirror any more, and nobody is told."""
        self.api.is_parted = self.content.is_parted = is_parted

    def heal(self) -> None:
        for proxy in (self.api, self.content, *self.peers.values()):
            proxy.heal()


@contextmanager
def faulty_ring(mirror: AgentMirror, root: Path) -> Iterator[FaultyRing]:
    """No node yet."""
    api = FaultProxy(
        ("127.0.0.1", urlsplit(mirror.url).port or 0), chosen=lambda asked: asked.startswith("GET /manifests/")
    )
    content = FaultProxy(("127.0.0.1", mirror.data_port or 0))
    served = mirror.data_port
    with api.running(), content.running():
        mirror.data_port = content.port
        try:
            yield FaultyRing(Ring(mirror, root, HASTY), api, content, {})
        finally:
            mirror.data_port = served
