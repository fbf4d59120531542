"""Several agents of one cluster in this process, who know one another."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bdn.core.layout import Manifest
from bdn.wire.stage_schema import StageDocument
from node_agent.app import Agent
from node_agent.fetch.peers import Waits
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged


@dataclass
class Ring:
    """The nodes of a cluster below ``root``; each may be opened and closed by itself."""

    mirror: AgentMirror
    root: Path
    waits: Waits | None = None
    elapsed: Callable[[], float] = time.monotonic
    agents: dict[str, Agent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mirror.ring = {}

    @asynccontextmanager
    async def agent(self, node: str, **changes: Any) -> AsyncIterator[Agent]:
        """One that runs and is known to all that run."""
        async with Rig(self.mirror, self.root / node, {"node": node}).agent(
            elapsed=self.elapsed, waits=self.waits, **changes
        ) as agent:
            self.agents[node] = agent
            await self.know()
            try:
                yield agent
            finally:
                del self.agents[node]

    @asynccontextmanager
    async def nodes(self, count: int, **changes: Any) -> AsyncIterator[list[Agent]]:
        """So many, from ``node-0`` on."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.agent(f"node-{number}", **changes)) for number in range(count)]

    async def know(self) -> None:
        """Everybody hears who the members are."""
        for agent in [*self.agents.values()] * 2:  # the last one joins after the others have asked
            await agent.heartbeats.beat()

    async def staged_by_all(self, manifest: Manifest, agents: Sequence[Agent] = ()) -> list[StageDocument]:
        """All at once."""
        return await asyncio.gather(
            *(staged(agent, self.mirror, manifest) for agent in agents or list(self.agents.values()))
        )


def came_from(stages: Sequence[StageDocument], tier: str) -> int:
    """Bytes of all mounts of all these stages together."""
    return sum(getattr(mount.bytes_from, tier) for stage in stages for mount in stage.mounts)
