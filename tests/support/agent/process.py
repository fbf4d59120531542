"""The daemon in a process of its own, which a test may kill."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bdn.net.api_clients import AgentClient
from bdn.wire.stage_schema import StageDocument, StageRequest
from tests.support.services.forked import Process, start

COMMAND = (sys.executable, "-m", "node_agent")
LONGEST_SECONDS = 240  # on a machine with a hundred other things to do


@dataclass(frozen=True)
class Daemon:
    """A running daemon: its process and a client of its socket."""

    process: Process
    client: AgentClient

    async def ended(self, stage: StageDocument) -> StageDocument:
        """The stage once nothing works on it."""
        while stage.state in ("PENDING", "STAGING"):
            stage = await self.client.stage_by_id(stage.id, 60)
        return stage

    async def staged(self, job: str, grant: str) -> StageDocument:
        """A stage that is READY."""
        stage = await self.ended(await self.client.stage(StageRequest(job_id=job, grant=grant)))
        assert stage.state == "READY", stage.error
        return stage

    async def kill(self) -> None:
        """As a crash does it: nothing is flushed, nothing is tidied up."""
        self.process.kill()
        await self.process.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; returns its exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(LONGEST_SECONDS):
            return await self.process.wait()


@dataclass(frozen=True)
class Program:
    """How daemons are started in one data directory."""

    root: Path
    url: str = "http://127.0.0.1:1"
    given: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = COMMAND

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "BDN_DATA_DIR": str(self.root),
            "BDN_URL": self.url,
            "BDN_OUTAGE_SECONDS": "0",
            "BDN_AGENT_DATA_PORT": "0",
            "BDN_AGENT_EXPOSURE": "none",
            "BDN_AGENT_HEADROOM_BYTES": "0",
        }
        return os.environ | own | self.given

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A run that ends by itself."""
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )

    @asynccontextmanager
    async def daemon(self, **environment: str) -> AsyncIterator[Daemon]:
        """A daemon that answers; killed at the end if it is still there. Its log is ``daemon.log``."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "daemon.log").open("ab") as log:
            process = await start(self.command, self.environment | environment, log.fileno(), log.fileno())
        try:
            async with AgentClient(f"unix:{self.root / 'agent.sock'}") as client:
                await self._answers(process, client)
                yield Daemon(process, client)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _answers(self, process: Process, client: AgentClient) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            while not await client.ready():
                assert process.returncode is None, (self.root / "daemon.log").read_text()
                await asyncio.sleep(0.02)  # another process: there is nothing to be notified by
