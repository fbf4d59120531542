"""A Slurm cluster whose nodes have agents and the hooks of deploy/slurm, and a mirror with tokens."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, Process
from tests.support.services.services import agent_client
from tests.support.services.slurm import NODES, SlurmCluster, namespaces, open_folder

HOOKS: Final = ("prolog", "epilog", "task_prolog")


@dataclass
class Site:
    root: Path
    slurm: SlurmCluster
    services: Cluster
    agents: dict[str, tuple[Process, ExitStack]] = field(default_factory=dict)

    def staged(self, node: str) -> list[str]:
        """Jobs that have, or are to get, files on this node, by its agent."""
        with agent_client(self.root / f"{node}.sock") as agent:
            stages: list[dict[str, Any]] = agent.get("/stages").raise_for_status().json()["items"]
        return [stage["job_id"] for stage in stages if stage["state"] not in {"RELEASED", "FAILED"}]

    def left(self, node: str) -> list[str]:
        """Jobs whose folders are on this node."""
        return sorted(one.name for one in self.jobs(node).iterdir())

    def forget_jobs(self, node: str) -> None:
        shutil.rmtree(self.jobs(node))

    def start_agent(self, node: str, **environment: str) -> None:
        """In the namespaces of Slurm, where jobs see what it mounts."""
        shell = self.services.shell(node, BDN_AGENT_EXPOSURE="bind", BDN_AGENT_CACHE_BYTES="1GB", **environment)
        shell.root.mkdir(exist_ok=True)
        shell = replace(shell, prefix=self.slurm.inside, is_forked=False)
        with ExitStack() as stack:
            process = stack.enter_context(shell.running("bdn-node-agent"))
            self.services.await_agent(shell)
            self.agents[node] = (process, stack.pop_all())

    def crash_agent(self, node: str) -> None:
        entering, stack = self.agents.pop(node)
        (agent,) = Path(f"/proc/{entering.pid}/task/{entering.pid}/children").read_text().split()
        os.kill(int(agent), signal.SIGKILL)
        stack.close()

    def close(self) -> None:
        for _, stack in self.agents.values():
            stack.close()

    def jobs(self, node: str) -> Path:
        return self.root / "jobs" / node

    def wait_seconds(self, seconds: int) -> None:
        """How long the next prologs wait for files."""
        (self.root / "seconds").write_text(str(seconds))


def _install(site: Path, slurm: SlurmCluster, token: str, url: str) -> None:
    """The scripts of deploy/slurm, with a folder and settings for each node: all nodes are this machine."""
    python = site / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')  # without -I: this checkout
    python.chmod(0o755)
    for name in NODES:
        (site / "jobs" / name).mkdir(parents=True)
        settings = site / f"{name}.toml"
        settings.write_text(f'url = "{url}"\ntoken = "{token}"\nagent_socket = "{site}/{name}.sock"\n')
        settings.chmod(0o600)
    changes = {
        "/opt/bdn/bin/python": str(python),
        "/run/bdn-slurm": f"{site}/jobs/$SLURMD_NODENAME",
        "/etc/bdn/slurm.toml": f"{site}/$SLURMD_NODENAME.toml",
        "--seconds 3000": f'--seconds "$(cat {site}/seconds)"',
        # Programs of packages that are not installed find their libraries by a variable.
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin": f"PATH={slurm.environment['PATH']} "
        f"LD_LIBRARY_PATH={slurm.environment['LD_LIBRARY_PATH']}",
    }
    used: set[str] = set()
    for hook in HOOKS:
        text = (ROOT / "deploy/slurm" / hook).read_text()
        used |= {old for old in changes if old in text}
        for old, new in changes.items():
            text = text.replace(old, new)
        (site / hook).write_text(text)
        (site / hook).chmod(0o755)
    assert used == set(changes)


@contextmanager
def slurm_site(upstream: dict[str, str]) -> Iterator[Site]:
    with open_folder() as root, ExitStack() as stack:
        services = Cluster(root, {**upstream, "BDN_AUTH": "token", "BDN_TOKEN": "operator"})
        stack.enter_context(services.mirror())
        operator = services.shell("operator")
        made = operator.told(
            "bdn-admin", "tokens", "create", "slurm", "--organisation", "default", "--role", "controller"
        )
        settings = {
            name: f"{root}/{hook}" for name, hook in zip(("Prolog", "Epilog", "TaskProlog"), HOOKS, strict=True)
        }
        slurm = SlurmCluster(root, {**settings, "PrologFlags": "Alloc", "PrologEpilogTimeout": "600"})
        slurm.init = stack.enter_context(namespaces(root))
        site = Site(root, slurm, services)
        stack.callback(site.close)
        for node in NODES:
            site.start_agent(node)
        site.wait_seconds(600)
        _install(root, slurm, made["token"], services.url)
        stack.callback(slurm.stop)
        slurm.start()
        yield site
