"""Where a training job runs: a table of clusters."""

from typing import Any, Final

import pytest

from bdn.core.errors import CacheAffinityError
from bdn.core.training.placement import Demand, Node, Waiting, place
from bdn.core.training.states import Failure

SMALL: Final = Demand(1)


def node(name: str, cluster: str = "c", *, kind: str | None = "H200", count: int = 8, **fields: Any) -> Node:
    return Node(cluster, name, kind, count, **{"slots": 1, **fields})


def cpu(name: str, cluster: str = "c", **fields: Any) -> Node:
    return node(name, cluster, kind=None, count=0, **fields)


def gpu(count: int = 8, nodes: int = 1, kind: str = "H200") -> Demand:
    return Demand(nodes, kind, count)


PLACED: Final = [
    ("the first by name", SMALL, [cpu("n2"), cpu("n1")], None, "c", ["n1"]),
    ("spelled otherwise", gpu(kind="h200"), [node("n1")], None, "c", ["n1"]),
    ("ranks on different nodes", gpu(2, nodes=2), [node("n1"), node("n2")], None, "c", ["n1", "n2"]),
    ("side by side", gpu(4), [node("n1", gpus_used=4)], None, "c", ["n1"]),
    ("the least to spare", gpu(2), [node("n1"), node("n2", gpus_used=6)], None, "c", ["n2"]),
    ("the first cluster with room", gpu(), [node("n1", "a", gpus_used=1), node("n2", "b")], None, "b", ["n2"]),
    ("another kind is passed over", gpu(), [node("n1", "a", kind="H100"), node("n2", "b")], None, "b", ["n2"]),
    ("the cache's cluster", gpu(), [node("n1", "a"), node("n2", "b")], "b", "b", ["n2"]),
    ("a job without GPUs on a node with them", SMALL, [node("n1", gpus_used=8)], None, "c", ["n1"]),
    ("an agent that is away is passed over", SMALL, [cpu("n1", is_alive=False), cpu("n2")], None, "c", ["n2"]),
]


@pytest.mark.parametrize(("what", "demand", "nodes", "pinned", "cluster", "names"), PLACED)
def test_place(
    what: str, demand: Demand, nodes: list[Node], pinned: str | None, cluster: str, names: list[str]
) -> None:
    found = place(demand, nodes, "llama", pinned)
    assert isinstance(found, tuple), found
    assert (found[0], [one.name for one in found[1]]) == (cluster, names), what


WAITING: Final = [
    ("all busy", gpu(), [node("n1", gpus_used=1)], None, "c"),
    ("all ranks or none", gpu(nodes=2), [node("n1"), node("n2", gpus_used=8)], None, "c"),
    ("no slot", SMALL, [cpu("n1", slots_used=1)], None, "c"),
    ("away", SMALL, [cpu("n1", is_alive=False)], None, "c"),
    ("not elsewhere than with the cache", gpu(), [node("n1", "a"), node("n2", "b", gpus_used=1)], "b", "b"),
    ("the first that could", gpu(), [node("n1", "b", gpus_used=8), node("n2", "a", gpus_used=8)], None, "a"),
]


@pytest.mark.parametrize(("what", "demand", "nodes", "pinned", "cluster"), WAITING)
def test_place__without_room_waits(
    what: str, demand: Demand, nodes: list[Node], pinned: str | None, cluster: str
) -> None:
    found = place(demand, nodes, "llama", pinned)
    assert isinstance(found, Waiting), (what, found)
    assert found.cluster == cluster
    assert str(demand) in found.reason


NEVER: Final = [
    (gpu(), []),
    (gpu(), [node("n1", kind="H100")]),
    (gpu(), [node("n1", count=4)]),
    (gpu(nodes=2), [node("n1", "a"), node("n2", "b")]),
    (SMALL, [cpu("n1", slots=0)]),
]


@pytest.mark.parametrize(("demand", "nodes"), NEVER)
def test_place__where_no_cluster_could_ever_run_it_fails(demand: Demand, nodes: list[Node]) -> None:
    found = place(demand, nodes, "llama", None)
    assert isinstance(found, Failure)
    assert found.code == "NO_SUCH_CAPACITY"


def test_place__a_cache_in_a_cluster_without_the_gpus() -> None:
    nodes = [node("n1", "a", kind="H100"), node("n2", "b")]
    with pytest.raises(CacheAffinityError, match="cluster a, which has no GPU H200"):
        place(gpu(), nodes, "llama", "a")
    found = place(gpu(), nodes, "llama", "a", require_cache_affinity=False)
    assert isinstance(found, tuple)
    assert found[0] == "b"
