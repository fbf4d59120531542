"""Mirrors and agents in processes of their own, as they run in production, and what is asked of them over HTTP."""

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.support.network.network import Host
from tests.support.network.ports import free_port
from tests.support.services.commands import Process, Shell, wait_until
from tests.support.services.processes import cpu_seconds, peak_megabytes

MIRROR = ("bdn", "serve")
AGENT = ("bdn-node-agent",)
TOKEN = "a-token-of-the-tests"  # of services in a network; on loopback nobody asks for it
_LONGEST_SECONDS = 3600
_LONGEST_START_SECONDS = 120


@dataclass(frozen=True)
class Mirror:
    """``bdn serve``, and a client of its API."""

    http: httpx2.Client
    process: Process
    shell: Shell
    url: str
    ports: tuple[int, int]  # of the API and of the data plane

    def plan(self, source: str, **patterns: Any) -> Any:
        return self._ask(source, {"dry_run": "true"}, patterns)

    def ready(self, source: str) -> Any:
        """The mirror's document once everything is held."""
        mirror = self._ask(source, {}, {})
        while mirror["status"] in {"PENDING", "SYNCING"}:
            mirror = self.http.get(f"/mirror/{mirror['id']}?wait=60").raise_for_status().json()
        assert mirror["status"] == "READY", mirror
        return mirror

    def _ask(self, source: str, params: dict[str, str], patterns: dict[str, Any]) -> Any:
        body = {"weights": [{"source": source, "mount_location": "/weights", **patterns}]}
        return self.http.post("/mirror", params=params, json=body).raise_for_status().json()

    def evict_agents(self) -> None:
        """Both tiers of all agents let go of everything; returns when the disk has taken notice, too."""
        for tier in ("node", "cluster"):
            answer = self.http.post("/evictions", params={"wait": 60}, json={"all": True, "tier": tier})
            assert answer.raise_for_status().json()["status"] == "DONE", answer.text
        os.sync()

    @property
    def data_url(self) -> str:
        return f"http://{urlsplit(self.url).hostname}:{self.ports[1]}"

    @property
    def store(self) -> Path:
        return self.shell.data / "store"

    @property
    def served_bytes(self) -> int:
        return int(metric(self.http, "bdn_mirror_served_bytes_total"))


@dataclass(frozen=True)
class Agent:
    """``bdn-node-agent``, and a client of its socket."""

    http: httpx2.Client
    process: Process
    shell: Shell

    def begin(self, grant: str, job: str, **options: Any) -> str:
        """Ask for a stage; its name."""
        body = {"job_id": job, "grant": grant, **options}
        return str(self.http.post("/stages", json=body).raise_for_status().json()["id"])

    def finished(self, stage_id: str) -> Any:
        """Wait for the stage; its document once it is READY."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while True:
            stage = self.http.get(f"/stages/{stage_id}", params={"wait": 60}).raise_for_status().json()
            if stage["state"] not in {"PENDING", "STAGING"}:
                assert stage["state"] == "READY", stage
                return stage
            assert time.monotonic() < deadline, stage

    def stage(self, grant: str, job: str, **options: Any) -> Any:
        """A stage from the request to READY."""
        return self.finished(self.begin(grant, job, **options))

    def unstage(self, stage: Any) -> None:
        """Its view is gone and its lease has ended; the cache keeps the files."""
        self.http.delete(f"/stages/{stage['id']}").raise_for_status()

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    @property
    def peak_megabytes(self) -> float:
        return peak_megabytes(self.process.pid)


def seconds_of(stage: Any) -> float:
    """From the request to READY, by the agent's own clock."""
    return (datetime.fromisoformat(stage["ready_at"]) - datetime.fromisoformat(stage["created_at"])).total_seconds()


def metric(http: httpx2.Client, name: str) -> float:
    """One value without labels."""
    lines = (line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#"))
    return sum(float(value) for key, _, value in lines if key == name)


@contextmanager
def mirror(
    root: Path, host: Host | None = None, command: Sequence[str] = MIRROR, /, **environment: str
) -> Iterator[Mirror]:
    """A mirror that answers, on ports of its own; in a host of a network it asks for ``TOKEN``."""
    port, data_port = free_port(), free_port()
    own = {"BDN_PORT": str(port), "BDN_DATA_PORT": str(data_port)}
    shell = Shell(root, {**own, **_place(host, "BDN_HOST"), **environment}, host.prefix if host else ())
    root.mkdir(exist_ok=True)
    url = f"http://{host.address if host else '127.0.0.1'}:{port}"
    with shell.running(*command) as process, _client(url) as http:
        wait_until(lambda: answers(http), seconds=_LONGEST_START_SECONDS, what="the mirror")
        yield Mirror(http, process, shell, url, (port, data_port))


@contextmanager
def agent(
    root: Path, mirror_url: str, host: Host | None = None, command: Sequence[str] = AGENT, /, **environment: str
) -> Iterator[Agent]:
    """An agent that the mirror knows, named after ``root``, where its content and its socket are."""
    with starting_agent(root, mirror_url, host, command, **environment) as started:
        wait_until(lambda: answers(started.http), seconds=_LONGEST_START_SECONDS, what="the agent")
        with _client(mirror_url) as asking:
            wait_until(lambda: is_known(asking, root.name), what="the agent's heartbeat")
        yield started


@contextmanager
def starting_agent(
    root: Path, mirror_url: str, host: Host | None = None, command: Sequence[str] = AGENT, /, **environment: str
) -> Iterator[Agent]:
    """The same before it answers, for whoever starts many at once."""
    own = {
        "BDN_URL": mirror_url,
        "BDN_AGENT_EXPOSURE": "none",
        "BDN_AGENT_HEADROOM_BYTES": "0",
        "BDN_AGENT_NODE": root.name,
    }
    place = _place(host, "BDN_AGENT_HOST") if host else {"BDN_AGENT_DATA_PORT": "0"}
    shell = Shell(root, {**own, **place, **environment}, host.prefix if host else ())
    root.mkdir(exist_ok=True)
    with shell.running(*command) as process, agent_client(shell.data / "agent.sock") as http:
        yield Agent(http, process, shell)


def _place(host: Host | None, variable: str) -> dict[str, str]:
    return {variable: host.address, "BDN_AUTH": "token", "BDN_TOKEN": TOKEN} if host else {}


def _client(url: str) -> httpx2.Client:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    return httpx2.Client(base_url=url, headers=bearer, timeout=_LONGEST_SECONDS, trust_env=False)


def agent_client(path: Path) -> httpx2.Client:
    """Of the agent whose socket is at ``path``."""
    return httpx2.Client(
        base_url="http://agent", transport=httpx2.HTTPTransport(uds=str(path)), timeout=_LONGEST_SECONDS
    )


def is_known(mirror: httpx2.Client, node: str) -> bool:
    """The mirror has heard from the agent of this name: it is known before its socket answers, and after it ended."""
    return node in {one["node"] for one in mirror.get("/agents").raise_for_status().json()["items"]}


def answers(http: httpx2.Client) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # httpcore leaves a refused Unix socket to the collector
        try:
            return http.get("/readyz").is_success
        except httpx2.TransportError:
            return False
