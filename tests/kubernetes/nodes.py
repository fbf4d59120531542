"""A node of the cluster, seen from outside: its power, its mounts, and the processes of its pods."""

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2

from bdn.net.api_clients import AgentClient
from bdn.wire.stage_schema import StageDocument

HERE: Final = Path(__file__).parent
_STARTED: Final = re.compile(
    r'(\d\d):(\d\d):([\d.]+) .*operationExecutor\.MountVolume started for volume "(.*?)" \(.*?pod "(.*?)"'
)
_ENDED: Final = re.compile(r'(\d\d):(\d\d):([\d.]+) .*MountVolume\.SetUp succeeded for volume "(.*?)" \(.*?pod "(.*?)"')


@dataclass
class Node:
    number: int
    folder: Path
    binaries: Path
    _power: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"node{self.number}"

    async def start(self) -> None:
        command = ["unshare", "--mount", "--pid", "--propagation", "private", "--fork", "--kill-child=KILL"]
        script = ["bash", str(HERE / "node.sh"), str(self.folder), str(self.binaries), str(self.number)]
        with (self.folder / "log" / self.name).open("ab") as log:
            self._power = await asyncio.create_subprocess_exec(*command, *script, stdout=log, stderr=log)

    async def cut_power(self) -> None:
        """End all of its processes at once, and with them its mounts."""
        first = self._first
        os.kill(first, signal.SIGKILL)
        assert self._power is not None
        await self._power.wait()

    @property
    def _first(self) -> int:
        """Its process 1, by the number that it has here."""
        assert self._power is not None
        assert self._power.returncode is None, (self.folder / "log" / self.name).read_text()
        children = Path(f"/proc/{self._power.pid}/task/{self._power.pid}/children").read_text().split()
        return int(children[0])

    @property
    def root(self) -> Path:
        """Its file system, with what is mounted there."""
        return Path(f"/proc/{self._first}/root")

    def volumes(self) -> list[str]:
        """Mounts and directories of volumes of the driver."""
        mounts = Path(f"/proc/{self._first}/mountinfo").read_text().split("\n")
        found = [line.split()[4] for line in mounts if "kubernetes.io~csi" in line]
        return found + [str(each) for each in self.root.glob("var/lib/kubelet/pods/*/volumes/kubernetes.io~csi/*")]

    def pid_of(self, program: str, variable: str) -> int:
        """The process of a container by its program, and the variable that names this node."""
        mark = f"{variable}={self.name}\0".encode()
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if program.encode() in (each / "cmdline").read_bytes() and mark in (each / "environ").read_bytes():
                    return int(each.name)
            except OSError:  # it has ended
                continue
        raise LookupError(f"{program} does not run on {self.name}")

    @property
    def _agent(self) -> str:
        """The control socket of the agent, which is in its pod."""
        pid = self.pid_of("bdn-node-agent", "BDN_AGENT_NODE")
        return f"/proc/{pid}/root/run/bdn/agent.sock"

    async def owners(self) -> int:
        """How many agents own chunks, as far as the agent of this node knows."""
        transport = httpx2.AsyncHTTPTransport(uds=self._agent)
        async with httpx2.AsyncClient(transport=transport, base_url="http://agent") as client:
            page = (await client.get("/metrics")).raise_for_status().text
        line = next(one for one in page.splitlines() if one.startswith("bdn_agent_cluster_owners"))
        return int(float(line.split()[1]))

    async def open_stages(self) -> list[StageDocument]:
        async with AgentClient(f"unix:{self._agent}") as client:
            return [stage for stage in (await client.stages()).items if stage.state not in ("RELEASED", "FAILED")]

    def published(self) -> dict[str, float]:
        """Seconds from the kubelet's first call until the volume was there, by pod; from its log."""
        started: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for line in (self.folder / f"log/kubelet{self.number}").read_text(errors="replace").splitlines():
            if '"w"' not in line and "kubernetes.io/csi" not in line:
                continue
            if found := _STARTED.search(line):
                started.setdefault(found[5], _seconds(found))
            elif (found := _ENDED.search(line)) and found[5] in started:
                seconds.setdefault(found[5], _seconds(found) - started[found[5]])
        return seconds


def _seconds(found: re.Match[str]) -> float:
    return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])


def listening_ports(pid: int) -> list[int]:
    """The TCP and UDP ports that the process itself has open."""
    sockets: set[str] = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(each.readlink()))
        except OSError:  # closed meanwhile
            continue
    ports = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            is_open = fields[3] == "0A" or table.startswith("udp")
            if is_open and f"socket:[{fields[9]}]" in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def json_lines(text: str) -> list[dict[str, str]]:
    """A log of BDN_LOG=json."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
