"""A mirror and agents in processes of their own, as an operator runs them, and commands that find them."""

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.support.network.ports import free_port
from tests.support.services.commands import Process, Shell, wait_until
from tests.support.services.services import agent_client, answers, is_known


@dataclass
class Cluster:
    """Processes by name, on ports of their own, with upstreams in ``extra``; forked unless the facts are about a start."""

    root: Path
    extra: dict[str, str]
    port: int = field(default_factory=free_port)
    data_port: int = field(default_factory=free_port)
    is_forked: bool = True

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}" if self.speaks_tls else f"http://127.0.0.1:{self.port}"

    @property
    def speaks_tls(self) -> bool:
        return "BDN_TLS_CERT" in self.extra

    def shell(self, node: str = "node-1", **environment: str) -> Shell:
        """A user on one node: commands find the mirror and the node's agent."""
        return Shell(
            self.root / node,
            {
                **self.extra,
                "BDN_URL": self.url,
                "BDN_AGENT_NODE": node,
                "BDN_AGENT_DATA_PORT": "0",
                "BDN_AGENT_EXPOSURE": "symlink",  # an agent leaves its mounts standing when it stops, and tests end with it
                "BDN_AGENT_SOCKET": str(self.root / f"{node}.sock"),
                **environment,
            },
            is_forked=self.is_forked,
        )

    def http(self) -> httpx2.Client:
        """The mirror's API for an operator."""
        bearer = {"Authorization": f"Bearer {self.extra.get('BDN_TOKEN')}"}
        trusted = ssl.create_default_context(cafile=self.extra["BDN_TLS_CA"]) if self.speaks_tls else False
        return httpx2.Client(base_url=self.url, headers=bearer, trust_env=False, timeout=60, verify=trusted)

    @contextlib.contextmanager
    def mirror(self, **environment: str) -> Iterator[Process]:
        """``bdn serve``, ready."""
        ports = {"BDN_PORT": str(self.port), "BDN_DATA_PORT": str(self.data_port)}
        shell = Shell(self.root / "mirror", {**self.extra, **ports, **environment}, is_forked=self.is_forked)
        for root in (shell.root, self.shell("operator").root):
            root.mkdir(exist_ok=True)
        with shell.running("bdn", "serve") as process, self.http() as http:
            wait_until(lambda: answers(http), what="the mirror's answer")
            yield process

    @contextlib.contextmanager
    def agent(self, node: str = "node-1", **environment: str) -> Iterator[Shell]:
        """``bdn-node-agent`` on a node, which answers and is known to the mirror; yields that node's shell."""
        shell = self.shell(node, **environment)
        shell.root.mkdir(exist_ok=True)
        with shell.running("bdn-node-agent"):
            self.await_agent(shell)
            yield shell

    def await_agent(self, shell: Shell) -> None:
        """Until the agent of this shell answers and is known to the mirror."""
        node, path = shell.extra["BDN_AGENT_NODE"], Path(shell.extra["BDN_AGENT_SOCKET"])
        with agent_client(path) as agent, self.http() as mirror:
            wait_until(lambda: answers(agent), what=f"the answer of {node}")
            wait_until(lambda: is_known(mirror, node), what=f"the heartbeat of {node}")
