"""A node of Kubernetes without the cluster: a hub, a mirror, an agent and the CSI driver, each in a process of its own."""

# ruff: noqa: ASYNC110 - other processes: there is nothing to be notified by

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bdn.disk.binding import mounts_below
from bdn.net.api_clients import MirrorClient
from bdn.wire.access_schema import Role, TokenRequest
from bdn.wire.stage_schema import StageDocument
from tests.support.agent.kubelet import Kubelet, Pod
from tests.support.agent.mounts import unmounting
from tests.support.agent.process import Daemon, Program
from tests.support.services.forked import Process, start
from tests.support.waiting import LONGEST_SECONDS, until

DRIVER_COMMAND = (sys.executable, "-m", "node_agent.csi")


@contextmanager
def node_folder() -> Iterator[Path]:
    """A folder with a short path, without mounts and files at the end."""
    folder = Path(tempfile.mkdtemp(prefix="csi-"))
    try:
        with unmounting(folder):
            yield folder
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class CsiNode:
    """The node's programs. ``given`` is the environment of the driver beyond what it needs."""

    root: Path
    url: str
    given: dict[str, str] = field(default_factory=dict)
    token: str | None = None  # of the mirror's operator

    def mirror(self) -> MirrorClient:
        return MirrorClient(self.url, self.token)

    async def token_of(self, organisation: str) -> str:
        """A new token, such as the mirror makes of a pod's."""
        async with self.mirror() as client:
            return (
                await client.create_token(TokenRequest(name="pod", organisation=organisation, role=Role.CONTROLLER))
            ).token

    @property
    def kubelet(self) -> Kubelet:
        return Kubelet(self.root / "k")

    @property
    def agent(self) -> Program:
        return Program(self.root / "agent", self.url)

    def pod(self, name: str = "pod-0", **given: str) -> Pod:
        return Pod(self.kubelet, name, **given)

    @asynccontextmanager
    async def driver(self, command: tuple[str, ...] = DRIVER_COMMAND, **environment: str) -> AsyncIterator[Process]:
        """The driver, registered; killed at the end if it is still there."""
        own = {**self.agent.environment, "BDN_CSI_KUBELET_DIR": str(self.kubelet.root), "BDN_CSI_NODE": "node-1"}
        own["BDN_AGENT_SOCKET"] = str(self.agent.root / "agent.sock")
        self.kubelet.root.mkdir(exist_ok=True)
        (self.kubelet.root / "pods").mkdir(exist_ok=True)
        with (self.root / "driver.log").open("ab") as log:
            process = await start(command, own | self.given | environment, log.fileno(), log.fileno())
        try:
            await until(lambda: self.kubelet.registration.exists() or process.returncode is not None)
            assert process.returncode is None, self.log
            await self.kubelet.register()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    @property
    def log(self) -> str:
        return (self.root / "driver.log").read_text()

    async def open_stages(self, daemon: Daemon) -> list[StageDocument]:
        return [stage for stage in (await daemon.client.stages()).items if stage.state not in ("RELEASED", "FAILED")]

    async def assert_nothing_is_left(self, daemon: Daemon, *pods: Pod) -> None:
        assert mounts_below(self.root) == []
        assert [pod.target for pod in pods if pod.target.parent.exists() and list(pod.target.parent.iterdir())] == []
        assert await self.open_stages(daemon) == []
        async with asyncio.timeout(LONGEST_SECONDS):
            while any(use.leased for use in (await daemon.client.cache()).tiers.values()):
                await asyncio.sleep(0.02)
            while [path for name in ("mounts", "views") for path in (self.agent.root / "cache" / name).iterdir()]:
                await asyncio.sleep(0.02)
