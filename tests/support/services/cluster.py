"""A mirror and an agent in processes of their own, as an operator runs them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.network.ports import free_port
from tests.support.services.commands import Shell, wait_until


@dataclass
class Cluster:
    """Processes by name, on ports of their own, with upstreams in ``extra``."""

    root: Path
    extra: dict[str, str]
    port: int = field(default_factory=free_port)
    data_port: int = field(default_factory=free_port)

    def shell(self, node: str = "node-1", **environment: str) -> Shell:
        """A user on one node: commands find the mirror and the node's agent."""
        return Shell(
            self.root / node,
            {
                **self.extra,
                "BDN_URL": f"http://127.0.0.1:{self.port}",
                "BDN_AGENT_NODE": node,
                "BDN_AGENT_DATA_PORT": "0",
                "BDN_AGENT_EXPOSURE": "symlink",  # an agent leaves its mounts standing when it stops, and tests end with it
                "BDN_AGENT_SOCKET": str(self.root / f"{node}.sock"),
                **environment,
            },
        )

    @contextlib.contextmanager
    def mirror(self, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """``bdn serve``, ready."""
        ports = {"BDN_PORT": str(self.port), "BDN_DATA_PORT": str(self.data_port)}
        shell = Shell(self.root / "mirror", {**self.extra, **ports, **environment})
        shell.root.mkdir(exist_ok=True)
        with shell.running("bdn", "serve") as process:
            asking = self.shell("operator")
            asking.root.mkdir(exist_ok=True)
            wait_until(lambda: asking.run("bdn-admin", "agents").code == 0, what="the mirror's answer")
            yield process

    @contextlib.contextmanager
    def agent(self, node: str = "node-1", **environment: str) -> Iterator[Shell]:
        """``bdn-node-agent`` on a node, known to the mirror; yields that node's shell."""
        shell = self.shell(node, **environment)
        shell.root.mkdir(exist_ok=True)
        with shell.running("bdn-node-agent"):
            wait_until(lambda: node in shell.run("bdn-admin", "agents").out, what=f"the heartbeat of {node}")
            yield shell
