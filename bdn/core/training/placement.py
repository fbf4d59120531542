"""Where a training job runs: which cluster, and which node for each rank. Decides from what agents reported."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bdn.core.training import affinity
from bdn.core.training.states import Failure


@dataclass(frozen=True, slots=True)
class Demand:
    """``nodes`` different nodes, each with ``gpus`` free GPUs of ``gpu_type``; without GPUs each with a free slot."""

    nodes: int
    gpu_type: str | None = None
    gpus: int = 0

    def __str__(self) -> str:
        each = f"{self.gpu_type}:{self.gpus} free" if self.gpus else "a free slot"
        return f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'} with {each}"


@dataclass(frozen=True, slots=True)
class Node:
    """An agent that runs jobs. ``gpus_used`` and ``slots_used`` by active jobs. ``is_alive``: it may be given more.

    Without a ``name``: a node that Kubernetes chooses.
    """

    cluster: str
    name: str
    gpu_type: str | None
    gpus: int
    slots: int
    gpus_used: int = 0
    slots_used: int = 0
    is_alive: bool = True

    def suits(self, demand: Demand) -> bool:
        """Whether it could run a rank, busy or not."""
        if not demand.gpus:
            return self.slots > 0
        return _spelled(self.gpu_type) == _spelled(demand.gpu_type) and self.gpus >= demand.gpus

    def has_room(self, demand: Demand) -> bool:
        if not (self.is_alive and self.suits(demand)):
            return False
        return self.gpus - self.gpus_used >= demand.gpus if demand.gpus else self.slots > self.slots_used


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job waits for this cluster to have room."""

    cluster: str
    reason: str


def offering(demand: Demand, nodes: Iterable[Node]) -> list[str]:
    """The clusters that could ever run the job, by name."""
    suited = [node.cluster for node in nodes if node.suits(demand)]
    return sorted(cluster for cluster in set(suited) if suited.count(cluster) >= demand.nodes)


def no_capacity(demand: Demand, nodes: Sequence[Node]) -> Failure:
    having = sorted({f"{node.gpu_type}:{node.gpus}" if node.gpus else "no GPUs" for node in nodes})
    reported = f"agents have reported nodes with {', '.join(having)}" if having else "no agent runs jobs"
    return Failure(
        "NO_SUCH_CAPACITY",
        f"no cluster could ever run this job, which needs {demand}: {reported}. "
        "Request less, start agents with the role job, or list the GPU type in BDN_KUBERNETES",
    )


def place(
    demand: Demand, nodes: Collection[Node], project: str, pinned: str | None, *, require_cache_affinity: bool = True
) -> tuple[str, list[Node]] | Waiting | Failure:
    """The cluster and the node of each rank, the lack of room, or why the job can never run.

    The cluster is the one of the project's training cache (``pinned``; None if the job has none), else the first by
    name with room, else the first that could run it. Of a cluster, the nodes with the least room to spare are taken.

    Raises ``CacheAffinityError``: the job must run with its cache, in a cluster that cannot run it.
    """
    able = offering(demand, nodes)
    if not able and (pinned is None or not require_cache_affinity):
        return no_capacity(demand, list(nodes))
    free = {cluster: _free(demand, cluster, nodes) for cluster in able}
    first = next((cluster for cluster in able if len(free[cluster]) >= demand.nodes), able[0] if able else "")
    cluster = affinity.place(
        project,
        pinned=pinned,
        offering=able,
        asking=first,
        gpu_type=demand.gpu_type,
        require_cache_affinity=require_cache_affinity,
    )
    if len(free[cluster]) >= demand.nodes:
        return cluster, free[cluster][: demand.nodes]
    return Waiting(cluster, f"needs {demand} in cluster {cluster}, which has {len(free[cluster])} such nodes now")


def _free(demand: Demand, cluster: str, nodes: Iterable[Node]) -> list[Node]:
    own = sorted((node for node in nodes if node.cluster == cluster and node.has_room(demand)), key=attrgetter("name"))
    return sorted(own, key=lambda node: node.gpus - node.gpus_used)


def _spelled(gpu_type: str | None) -> str:
    return (gpu_type or "").upper()
