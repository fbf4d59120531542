"""Agents for tests: opened in this process on a directory of the test's own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bdn.core.layout import Manifest
from bdn.core.pace.retry import RetryPolicy
from bdn.wire.heartbeat_schema import Report
from bdn.wire.operation_schema import VerifyCommand, VerifyReport
from bdn.wire.stage_schema import StageDocument
from node_agent.app import Agent, open_agent
from node_agent.fetch.peers import Waits
from node_agent.settings import AgentSettings, load_settings
from node_agent.stage.stage import StageRegistry
from tests.support.agent.mirror import AgentMirror

IMPATIENT = RetryPolicy(outage_seconds=0, attempts=3, first_seconds=0.001, longest_seconds=0.002)


@dataclass(frozen=True)
class Rig:
    """One node: a mirror, and a directory on which agents can be opened one after the other."""

    mirror: AgentMirror
    root: Path
    given: dict[str, Any] = field(default_factory=dict)

    def settings(self, **changes: Any) -> AgentSettings:
        defaults = {
            "data_dir": self.root,
            "url": self.mirror.url,
            "data_port": 0,
            "exposure": "none",
            "headroom_bytes": 0,
            "byte_threads": 4,
            "node": "node-1",
        }
        return load_settings(**{**defaults, **self.given, **changes})

    @asynccontextmanager
    async def agent(
        self,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
        waits: Waits | None = None,
        **changes: Any,
    ) -> AsyncIterator[Agent]:
        """A running agent until the block ends."""
        async with open_agent(
            self.settings(**changes), policy=IMPATIENT, clock=clock, elapsed=elapsed, waits=waits
        ) as agent:
            yield agent

    @property
    def cache(self) -> Path:
        return self.root / "cache"


async def staged(agent: Agent, mirror: AgentMirror, *manifests: Manifest, job: str = "job") -> StageDocument:
    """Stage these manifests and wait; raises why it failed."""
    stage = await agent.stages.start(job, mirror.grant(*manifests))
    async with asyncio.timeout(30):
        return await agent.stages.finish(stage.record.id)


async def at_rest(registry: StageRegistry) -> None:
    """Until nothing works on a stage: a task that looks through a stage may begin another, that mends it."""
    async with asyncio.timeout(30):
        while working := [stage.task for stage in registry.all() if stage.task and stage.is_working]:
            await asyncio.wait(working)


async def verified(agent: Agent, command: VerifyCommand) -> VerifyReport:
    """Carry a verification out; what it reports."""
    reports: list[Report] = []
    await agent.verifications.run(command, reports.append)
    assert reports[-1].verify is not None
    return reports[-1].verify


def disk_bytes(cache: Path) -> int:
    """Bytes of content on disk now, whole and in progress."""
    total = 0
    for folder in ("files", "filling"):
        for path in (cache / folder).rglob("*"):
            try:
                if path.is_file() and path.suffix != ".bitmap":
                    total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def metrics(text: str) -> dict[str, float]:
    """Prometheus' text form as a dictionary."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
