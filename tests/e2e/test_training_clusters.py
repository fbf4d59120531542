"""Training jobs by the unmodified truss on several nodes and clusters: the barrier, and where a cache lets a job run."""

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import ending_ranks, needs_bwrap
from tests.support.network.ports import free_port
from tests.support.services.cluster import Cluster
from tests.support.services.commands import LONGEST_SECONDS, Shell, wait_until
from tests.support.services.services import agent_client, metric
from tests.support.services.training import CLIENTS, User, agent, ended, left_over, over, project_cache

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
MODEL: Final = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
SIZE: Final = sum(map(len, MODEL.values()))
WEIGHTS: Final = 'WeightsSource(source="hf://org/model", mount_location="/app/model")'
CACHE: Final = "cache_config=CacheConfig(enabled=True)"
ANYWHERE: Final = "cache_config=CacheConfig(enabled=True, require_cache_affinity=False)"
STAGED: Final = "all ranks are staged; their commands start"
# Says that it began, with the size of its weights, and ends once it may.
HELD: Final = """
import os, pathlib, time
cache = pathlib.Path(os.environ["BT_PROJECT_CACHE_DIR"])
size = sum(path.stat().st_size for path in pathlib.Path("/app").rglob("*") if path.is_file())
(cache / ("begun-" + os.environ["BT_NODE_RANK"])).write_text(str(size))
deadline = time.monotonic() + 900
while not (cache / "end").exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""
# No rank ends before the leader has met all of them.
GROUP: Final = """
import os, pathlib, socket, time
begun_at = time.time_ns()
rank, size = int(os.environ["BT_NODE_RANK"]), int(os.environ["BT_GROUP_SIZE"])
weights = sum(path.stat().st_size for path in pathlib.Path("/app").rglob("*") if path.is_file())
print("rank", rank, "of", size, "begun at", begun_at, "with", weights, "bytes", flush=True)
socket.setdefaulttimeout(900)
if rank == 0:
    with socket.create_server(("", {port}), backlog=size) as server:
        members = [server.accept()[0] for _ in range(1, size)]
        ranks = sorted(int.from_bytes(one.recv(4)) for one in members)
        assert ranks == list(range(1, size)), ranks
        for one in members:
            one.sendall(b"!")
else:
    deadline = time.monotonic() + 900
    while True:
        try:
            leader = socket.create_connection((os.environ["BT_LEADER_ADDR"], {port}))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    leader.sendall(rank.to_bytes(4))
    assert leader.recv(1) == b"!"
print("rank", rank, "met all", flush=True)
"""


@pytest.fixture
def cluster(backend: str, tmp_path: Path, hub: Hub) -> Iterator[Cluster]:
    """Its mirror goes on with an upstream that stalls, for as long as a slow machine takes."""
    hub.repo("org/model").commit(MODEL)
    with unmounting(tmp_path), ending_ranks(tmp_path):
        cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url, "BDN_OUTAGE_SECONDS": str(LONGEST_SECONDS)})
        with cluster.mirror():
            yield cluster


def fetched_bytes(*shells: Shell) -> int:
    """By agents, from the mirror or from the bucket of its store."""
    found = 0.0
    for shell in shells:
        with agent_client(Path(shell.extra["BDN_AGENT_SOCKET"])) as http:
            ways = (f'bdn_agent_origin_bytes_total{{delivery="{way}"}}' for way in ("direct", "proxy"))
            found += sum(metric(http, name) for name in ways)
    return int(found)


def begun(user: User, job: str) -> dict[str, int]:
    """The size of the weights that the ranks found when their first command began."""
    return {path.name: int(path.read_text() or 0) for path in project_cache(user, job).glob("begun-*")}


@pytest.mark.production
def test_a_stalled_upstream__keeps_a_job_created_and_every_node_free(cluster: Cluster, hub: Hub) -> None:
    hub.fail(stall(at=1000), origin="cdn", times=None)
    with agent(cluster) as one, agent(cluster, "node-2") as two:
        user = User(cluster, one)
        job = user.start(
            "held", "python3 script.py", files={"script.py": HELD}, nodes=2, weights=WEIGHTS, runtime=CACHE
        )
        wait_until(lambda: hub.log.bytes_served(origin="cdn") >= 1000, what="the first bytes of the weights")
        other = user.start("other", "true", nodes=2)
        assert over(user, other) == ("COMPLETED", "")  # meanwhile, on all nodes
        wait_until(lambda: left_over(one) + left_over(two) == [], what="empty nodes")
        assert ended(user, job) == ("CREATED", "")
        assert "staging" not in user.logs(job)

        hub.release_stalled()
        wait_until(lambda: ended(user, job)[0] == "RUNNING" and len(begun(user, job)) == 2, what="the first commands")
        wait_until(lambda: begun(user, job) == {"begun-0": SIZE, "begun-1": SIZE}, what="whole weights")
        fetched = fetched_bytes(one, two)
        assert fetched >= SIZE
        log = user.logs(job)
        assert log.index("mirroring") < log.index("staging on 2 nodes") < log.index(STAGED)
        (project_cache(user, job) / "end").touch()
        assert over(user, job) == ("COMPLETED", "")
        assert fetched_bytes(one, two) == fetched
        wait_until(lambda: left_over(one) + left_over(two) == [], what="empty nodes")


def ranks(user: User, job: str) -> dict[str, Any]:
    return {one["node"]: one for one in user.job(job)["bdn"]["ranks"]}


@pytest.mark.parametrize("nodes", [pytest.param(2, marks=pytest.mark.production), 8])
def test_ranks__begin_together_once_the_last_one_is_staged(cluster: Cluster, nodes: int) -> None:
    late = f"node-{nodes}"
    small = {"BDN_AGENT_CACHE_BYTES": "160MB", "BDN_AGENT_HEADROOM_BYTES": "0", "BDN_AGENT_SCRATCH_BYTES": "64MB"}
    with ExitStack() as stack:
        shells = [stack.enter_context(agent(cluster, f"node-{number + 1}", **small)) for number in range(nodes)]
        # With the scratch of a rank, too little is left of the cache for the weights.
        shells[-1].told("bdn", "volumes", "create", "--job", "first", "--scratch", "95.5MB")
        user = User(cluster, shells[0])
        script = GROUP.format(port=free_port())
        job = user.start("group", "python3 script.py", files={"script.py": script}, nodes=nodes, weights=WEIGHTS)

        def has_one_late() -> bool:
            found = ranks(user, job)
            states = {one["state"] for name, one in found.items() if name != late}
            return states == {"STAGED"} and (found[late]["error"] or {}).get("code") == "CACHE_FULL"

        wait_until(has_one_late, what="the last rank")
        assert ended(user, job)[0] == "DEPLOYING"
        assert "begun" not in user.logs(job)
        released_at = time.time_ns()
        assert shells[-1].run("bdn", "volumes", "rm", "--job", "first").code == 0
        assert over(user, job) == ("COMPLETED", "")
        log = user.logs(job)
        found = re.findall(r"rank (\d+) of (\d+) begun at (\d+) with (\d+) bytes", log)
        assert sorted((int(rank), int(size), int(weights)) for rank, size, _, weights in found) == [
            (rank, nodes, SIZE) for rank in range(nodes)
        ]
        assert min(int(begun_at) for _, _, begun_at, _ in found) > released_at
        assert len(re.findall(r"rank \d+ met all", log)) == nodes


def gpus(kind: str) -> str:
    return f'accelerator=AcceleratorSpec(accelerator="{kind}", count=8)'


def in_cluster(cluster: Cluster, name: str, gpu: str) -> AbstractContextManager[Shell]:
    """An agent of another cluster, with a volume of its own."""
    own = {"BDN_AGENT_CLUSTER": name, "BDN_AGENT_VOLUME_ROOT": str(cluster.root / f"volume-{name}")}
    return agent(cluster, f"node-{name}", BDN_AGENT_GPU=f"{gpu}:8", **own)


@pytest.mark.production
def test_a_job_with_a_cache__runs_where_its_cache_is_or_elsewhere_with_an_empty_one(cluster: Cluster) -> None:
    with in_cluster(cluster, "east", "H100") as shell, in_cluster(cluster, "west", "H200"):
        user = User(cluster, shell)

        def ran(command: str, kind: str, runtime: str) -> tuple[str, str]:
            """The cluster, and the output."""
            job = user.start("pinned", command, compute=gpus(kind), runtime=runtime)
            assert over(user, job) == ("COMPLETED", "")
            return user.job(job)["bdn"]["cluster"], user.logs(job)

        count = "echo $BT_NUM_GPUS GPUs, $(ls -A $BT_PROJECT_CACHE_DIR | wc -l) files; touch $BT_PROJECT_CACHE_DIR/f"
        where, log = ran(count, "H100", CACHE)
        assert (where, "8 GPUs, 0 files" in log) == ("east", True)
        refused = user.start("pinned", "true", compute=gpus("H200"), runtime=CACHE)
        status, reason = over(user, refused)
        assert (status, reason.endswith("[CACHE_AFFINITY]")) == ("DEPLOY_FAILED", True)
        assert reason in " ".join(user.logs(refused).split())
        assert ranks(user, refused) == {}
        where, log = ran(count, "H200", ANYWHERE)
        assert (where, "8 GPUs, 0 files" in log) == ("west", True)
        (cache,) = shell.told("bdn-admin", "cache", "ls")["items"]
        assert cache["cluster"] == "east"
        assert [one["cluster"] for one in cache["directories"]] == ["east", "west"]
        where, log = ran(count, "H100", CACHE)
        assert (where, "8 GPUs, 1 files" in log) == ("east", True)


@pytest.mark.production
def test_a_project__is_deleted_with_its_cache_once_its_jobs_have_ended(cluster: Cluster) -> None:
    with agent(cluster) as one, agent(cluster, "node-2") as two:
        user = User(cluster, one)
        job = user.start("llama", "python3 script.py", files={"script.py": HELD}, runtime=CACHE)
        wait_until(lambda: ended(user, job)[0] == "RUNNING" and begun(user, job), what="the first command")
        project, cache = user.job(job)["training_project_id"], project_cache(user, job)
        (other,) = [shell for shell in (one, two) if shell.extra["BDN_AGENT_NODE"] not in ranks(user, job)]
        for words in (("projects", "rm", "llama"), ("cache", "rm", "llama", "user_artifacts/begun-0")):
            error = other.told("bdn-admin", *words, code=3)["error"]
            assert (error["code"], f"training job {job}" in error["message"]) == ("IN_USE", True)
        with cluster.http() as http:
            answer = http.delete(f"/v1/training_projects/{project}")
        assert (answer.status_code, answer.json()["code"]) == (409, "IN_USE")
        assert [path.name for path in cache.iterdir()] == ["begun-0"]

        assert user.truss("stop", "--job-id", job).code == 0
        assert over(user, job) == ("STOPPED", "")
        wait_until(lambda: other.run("bdn-admin", "projects", "rm", "llama").code == 0, what="the unused cache")
        wait_until(lambda: not other.told("bdn-admin", "cache", "ls")["removals"], what="the removal")
        assert [path.name for path in cache.parents[1].iterdir()] == [f"{project}.gone"]
        wait_until(lambda: not list((cluster.root / "volume/.trash").iterdir()), what="the empty trash")
