"""Agents in this process with a fault proxy on each of their ways: to the mirror's API and data plane, and to each other."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from bdn.core.pace.retry import StallPolicy
from node_agent.app import Agent
from node_agent.fetch.peers import Waits
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.ring import Ring
from tests.support.network.fault_proxy import FaultProxy
from tests.support.network.ports import free_port

_STEP_SECONDS: Final = 0.01

# A fiftieth of the deadlines in production, so that silence costs a test little.
HASTY: Final = Waits(
    peer_seconds=0.4,
    mirror_seconds=0.4,
    stall=StallPolicy(least_bytes=64 * 1024, window_seconds=0.4),
    document_seconds=(1.0, 2.0),
)


class ExperiencedTime:
    """Seconds in which this process could work: a busy machine that lets it wait for half a second is no silent peer."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __call__(self) -> float:
        return self._now

    @contextmanager
    def running(self) -> Iterator[Self]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()

    def _count(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_STEP_SECONDS):
            now = time.monotonic()
            self._now += min(now - last, 2 * _STEP_SECONDS)
            last = now


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
    with api.running(), content.running(), ExperiencedTime().running() as elapsed:
        mirror.data_port = content.port
        try:
            yield FaultyRing(Ring(mirror, root, HASTY, elapsed), api, content, {})
        finally:
            mirror.data_port = served
