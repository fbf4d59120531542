"""A mirror, and what runs its training jobs: agents on two nodes, or the pods of a Kubernetes with two nodes."""

import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx2

from bdn.mirror.db.secrets import new_key
from tests.doubles.faults import drop
from tests.doubles.hub import Hub
from tests.doubles.kubernetes import Issuer
from tests.doubles.kubernetes_api import ApiServer
from tests.support.agent.mounts import unmounting
from tests.support.agent.runs import ending_ranks
from tests.support.mirror.pod_jobs import cluster_file, kubernetes
from tests.support.mirror.training_jobs import TERMINAL
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Process, Shell, wait_until
from tests.support.services.pod_kubelet import Kubelet
from tests.support.services.services import agent_client

NODES: Final = ("n1", "n2")
OPERATOR: Final = "the-operator-of-the-settings"
Json = dict[str, Any]


class Jobs:
    """The training jobs of one project."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        made = self._ask("POST", "/v1/training_projects", {"training_project": {"name": "llama"}})
        self.path = f"/v1/training_projects/{made['training_project']['id']}/jobs"

    def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        with self.cluster.http() as http:
            answer = http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def create(self, *commands: str, nodes: int = 1, weights: list[Json] | None = None, **runtime: Any) -> str:
        request = {
            "image": {"base_image": "python:3.11"},
            "compute": {"node_count": nodes},
            "runtime": {"start_commands": list(commands), **runtime},
            "weights": weights or [],
        }
        return str(self._ask("POST", self.path, {"training_job": request})["training_job"]["id"])

    def get(self, job: str) -> Json:
        return dict(self._ask("GET", f"{self.path}/{job}")["training_job"])

    def status(self, job: str) -> str:
        return str(self.get(job)["current_status"]).removeprefix("TRAINING_JOB_")

    def reached(self, job: str, *statuses: str) -> Json:
        def is_there() -> bool:
            status = self.status(job)
            assert status in statuses or status not in TERMINAL, (self.get(job), self.lines(job))
            return status in statuses

        wait_until(is_there, seconds=60, what=f"{statuses} of job {job}")
        return self.get(job)

    def stop(self, job: str) -> None:
        self._ask("POST", f"{self.path}/{job}/stop", {})

    def lines(self, job: str) -> list[str]:
        """What the ranks printed."""
        logs = self._ask("POST", f"{self.path}/{job}/logs", {"direction": "asc"})["logs"]
        return [one["message"] for one in logs if one["replica"] and not one["message"].startswith("bdn: ")]

    def printed(self, job: str, line: str) -> None:
        wait_until(lambda: line in self.lines(job), what=f"{line!r} of job {job}")

    def states(self, job: str) -> list[str]:
        return [rank["state"] for rank in self.get(job)["bdn"]["ranks"]]

    def checkpoints(self, job: str) -> list[str]:
        return [one["checkpoint_id"] for one in self._ask("GET", f"{self.path}/{job}/checkpoints")["checkpoints"]]


class World(ABC):
    """Nodes ``n1`` and ``n2``, each with room for one rank. Processes end with the block."""

    name: ClassVar[str]

    def __init__(self, root: Path, hub: Hub) -> None:
        self.root = root
        given = {"BDN_AUTH": "token", "BDN_TOKEN": OPERATOR, "BDN_SECRETS_KEY": new_key(), "HF_ENDPOINT": hub.url}
        self.cluster = Cluster(root, given)
        self.stack = ExitStack()
        self._mirror: tuple[ExitStack, Process] | None = None

    @contextmanager
    def running(self) -> Iterator[Jobs]:
        with self.stack, unmounting(self.root), ending_ranks(self.root):
            self.start_mirror()
            self.stack.callback(self.end_mirror, signal.SIGTERM)
            self.start_nodes()
            yield Jobs(self.cluster)

    def start_mirror(self) -> None:
        stack = ExitStack()
        self._mirror = stack, stack.enter_context(self.cluster.mirror(**self.mirror_settings()))

    def end_mirror(self, number: signal.Signals) -> None:
        assert self._mirror is not None
        stack, process = self._mirror
        process.send_signal(number)
        process.wait(20)
        stack.close()

    def store_secret(self, name: str, value: str) -> None:
        with self.cluster.http() as http:
            assert http.put(f"/secrets/{name}", json={"value": value}).is_success

    def mirror_settings(self) -> dict[str, str]:
        return {}

    @abstractmethod
    def start_nodes(self) -> None: ...

    @abstractmethod
    def held(self, *nodes: str) -> AbstractContextManager[None]:
        """These nodes start no rank until the block ends."""

    @abstractmethod
    def away(self) -> AbstractContextManager[None]:
        """What runs ranks cannot be reached until the block ends; the ranks go on."""

    @abstractmethod
    def lose(self, node: str) -> None:
        """A node is lost, with all that runs there."""

    @abstractmethod
    def written(self) -> Iterator[bytes]:
        """Everything that was written about jobs outside of them."""


class OfAgents(World):
    name = "agents"

    def __init__(self, root: Path, hub: Hub) -> None:
        super().__init__(root, hub)
        self.agents: dict[str, tuple[ExitStack, Process, Shell]] = {}

    def start_nodes(self) -> None:
        for node in NODES:
            self.stack.callback(self._end, node, signal.SIGTERM)
            self._start(node)

    def _start(self, node: str) -> None:
        given = {"BDN_AGENT_ROLES": "node,cluster,job", "BDN_AGENT_JOB_LAUNCHER": "bwrap", "BDN_AGENT_EXPOSURE": "bind"}
        shell = self.cluster.shell(node, **given, BDN_AGENT_SETTLE_SECONDS="0")
        shell.root.mkdir(exist_ok=True)
        stack = ExitStack()
        self.agents[node] = stack, stack.enter_context(shell.running("bdn-node-agent")), shell
        self.cluster.await_agent(shell)

    def _end(self, node: str, number: signal.Signals) -> None:
        stack, process, _ = self.agents[node]
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        process.wait(20)
        stack.close()

    @contextmanager
    def held(self, *nodes: str) -> Iterator[None]:
        for node in nodes:
            self.agents[node][1].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for node in nodes:
                self.agents[node][1].send_signal(signal.SIGCONT)

    @contextmanager
    def away(self) -> Iterator[None]:
        for node in NODES:
            self._end(node, signal.SIGKILL)
        yield
        for node in NODES:
            self._start(node)

    def lose(self, node: str) -> None:
        self._end(node, signal.SIGKILL)
        data = self.agents[node][2].data
        with ending_ranks(data), unmounting(data):
            pass
        shutil.rmtree(data)
        self._start(node)

    def written(self) -> Iterator[bytes]:
        yield from (path.read_bytes() for path in self.root.rglob("*") if path.is_file())


class OfPods(World):
    name = "pods"
    api: ApiServer
    kubelet: Kubelet

    def mirror_settings(self) -> dict[str, str]:
        if not hasattr(self, "api"):
            issuer = self.stack.enter_context(Issuer())
            self.api = self.stack.enter_context(kubernetes(self.root, *NODES))
            self.file = cluster_file(self.root, issuer, self.api, self.cluster.url)
            self.kubelet = self.stack.enter_context(Kubelet(self.api, issuer, self.root / "pods", self._stage))
        return {"BDN_KUBERNETES": str(self.file)}

    def start_nodes(self) -> None:
        (self.root / "pods").mkdir()
        self.shell = self.stack.enter_context(self.cluster.agent(NODES[0], BDN_AGENT_EXPOSURE="bind"))

    def _stage(self, pod: str, mirror: str, place: str, token: str) -> Path:
        """As the CSI driver, through the agent of the node."""
        bearer = {"Authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=self.cluster.url, headers=bearer, trust_env=False, timeout=60) as http:
            found = http.get(f"/mirror/{mirror}", params={"mount": place})
            assert found.is_success, found.text
        with agent_client(Path(self.shell.extra["BDN_AGENT_SOCKET"])) as agent:
            stage = agent.post(
                "/stages", json={"job_id": f"training/{pod}{place}", "grant": found.json()["grant"], "wait": True}
            )
            assert stage.is_success, stage.text
        (mount,) = stage.json()["mounts"]
        return Path(mount["path"])

    @contextmanager
    def held(self, *nodes: str) -> Iterator[None]:
        self.kubelet.held |= set(nodes)
        try:
            yield
        finally:
            self.kubelet.held -= set(nodes)

    @contextmanager
    def away(self) -> Iterator[None]:
        self.api.fail(drop())
        yield
        self.api.mend()

    def lose(self, node: str) -> None:
        self.kubelet.lose(node)

    def written(self) -> Iterator[bytes]:
        yield from (str(one).encode() for one in self.api.sent)
        yield from (path.read_bytes() for path in self.root.rglob("*") if path.is_file())
