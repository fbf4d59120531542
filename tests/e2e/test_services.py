"""Mirror and agents as services, driven by the commands."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.crash.rot import flip
from tests.support.mirror.backends import behind
from tests.support.promises.tally import Tally
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell
from tests.support.services.logs import fields_of
from tests.support.services.services import agent_client

MODEL = {
    "config.json": b"{}",
    "deep/model.safetensors": bytes(range(256)) * 70_000,
    "empty.txt": b"",
    "a b/\u00fc.txt": b"x",
}
SIZE = sum(len(content) for content in MODEL.values())
REPEATED = CHUNK_SIZE  # of the large file: its first two chunks are equal, so the second one is found on the node


@pytest.fixture(scope="module")
def upstream() -> Iterator[Hub]:
    with Hub() as double:
        double.repo("org/model").commit(MODEL)
        yield double


@pytest.fixture(scope="module")
def services(backend: str, tmp_path_factory: pytest.TempPathFactory, upstream: Hub) -> Iterator[tuple[Cluster, Shell]]:
    cluster = Cluster(tmp_path_factory.mktemp("services"), {"HF_ENDPOINT": upstream.url})
    with cluster.mirror(), cluster.agent() as shell:
        yield cluster, shell


@pytest.fixture
def node(services: tuple[Cluster, Shell], upstream: Hub) -> Iterator[Shell]:
    """A node of a mirror, both of them empty."""
    upstream.log.clear()
    cluster, shell = services
    yield shell
    with cluster.http() as mirror, agent_client(Path(shell.extra["BDN_AGENT_SOCKET"])) as agent:
        for stage in agent.get("/stages").json()["items"]:
            agent.delete(f"/stages/{stage['id']}").raise_for_status()
        for where in ({"node": "node-1"}, {"tier": "mirror"}):
            evicted = mirror.post("/evictions", params={"wait": 60}, json={"all": True, "force": True, **where})
            assert evicted.json()["status"] == "DONE", evicted.text


def mirrored(shell: Shell, source: str = "hf://org/model") -> str:
    return str(shell.told("bdn", "mirror", source, "--mount", "/app/model", "--wait")["id"])


@pytest.mark.production
def test_a_mirrored_source_is_staged_evicted_and_staged_again(node: Shell, upstream: Hub) -> None:
    mirror_id = mirrored(node)
    stage = node.run("bdn", "stage", mirror_id, "--job", "train", "--json").document

    (mount,) = stage["mounts"]
    assert stage["state"] == "READY"
    assert mount["path"].endswith(f"/{stage['id']}/app/model")
    assert tree(Path(mount["path"])) == MODEL
    assert mount["bytes_from"] == {"node": REPEATED, "cluster": 0, "mirror": SIZE - REPEATED}

    # in use: planned and refused, with the holder's name
    for arguments in (
        ("hf://org/model",),
        (mount["manifest"],),
        ("--job", "train"),
        ("--all",),
    ):
        refused = node.told("bdn-admin", "evict", *arguments, "--tier", "node", code=3)
        assert [item["refused"] for item in refused["items"]] == [True]
        assert "job train" in refused["items"][0]["holders"][0]
    assert node.run("bdn-admin", "evict", "--lru", "1GB", "--json").document["bytes_freed"] == 0
    assert tree(Path(mount["path"])) == MODEL

    # released: a dry run changes nothing, the eviction frees, the mirror still holds it
    assert node.run("bdn", "unstage", "--job", "other", "--json").document["items"] == []
    unstaged = node.run("bdn", "unstage", "--job", "train", "--json").document["items"]
    assert [one["id"] for one in unstaged] == [stage["id"]]
    assert not Path(mount["path"]).exists()
    planned = node.run("bdn-admin", "evict", "hf://org/model", "--tier", "node", "--dry-run", "--json")
    assert (planned.code, planned.document["bytes_freed"]) == (0, SIZE)
    held = node.run("bdn-admin", "ls", "--json").document["items"]
    assert held[0]["nodes"]["default/node-1"]["bytes"] == SIZE
    evicted = node.run("bdn-admin", "evict", "--lru", "1", "--json")
    assert (evicted.code, evicted.document["bytes_freed"]) == (0, SIZE)

    again = node.run("bdn", "stage", mirror_id, "--job", "train-2", "--json").document
    assert again["mounts"][0]["bytes_from"]["mirror"] == SIZE - REPEATED
    assert upstream.log.bytes_served(origin="cdn") == len(MODEL["deep/model.safetensors"])  # the upstream was read once

    # by force against jobs that a plan named, which was before this job
    plan = ("--plan", planned.document["id"])
    refused = node.run("bdn-admin", "evict", "--all", "--tier", "node", "--force", *plan, "--json")
    assert (refused.code, refused.document["items"][0]["holders"]) == (3, [f"job train-2 (stage {again['id']})"])
    # by force, in use or not
    forced = node.told("bdn-admin", "evict", "--all", "--force")
    assert {item["tier"] for item in forced["items"]} == {"node", "mirror"}
    assert not Path(again["mounts"][0]["path"]).exists()
    assert node.run("bdn", "stage", mirror_id, "--job", "train").code == 2  # it says that the mirror was evicted


def test_the_upstream_may_be_gone_once_a_mirror_is_ready_and_the_mirror_for_what_a_node_holds(tmp_path: Path) -> None:
    """With programs that are executed: what is installed starts."""
    with contextlib.ExitStack() as stack:
        with Hub() as hub:
            hub.repo("org/model").commit(MODEL)
            cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url}, is_forked=False)
            process = stack.enter_context(cluster.mirror())
            mirror_id = mirrored(cluster.shell("operator"))

        node = stack.enter_context(cluster.agent())
        stage = node.told("bdn", "stage", mirror_id, "--job", "one")
        assert tree(Path(stage["mounts"][0]["path"])) == MODEL

        with cluster.http() as http:
            grant = http.get(f"/mirror/{mirror_id}").json()["grant"]
        process.kill()
        process.wait()
        with agent_client(Path(node.extra["BDN_AGENT_SOCKET"])) as agent:
            again = agent.post("/stages", json={"job_id": "two", "grant": grant, "wait": True}).json()
            assert again["state"] == "READY", again
            assert again["mounts"][0]["bytes_from"]["node"] == SIZE
        assert [node.run("bdn", "unstage", one).code for one in (stage["id"], again["id"])] == [0, 0]


def test_one_mirror_feeds_nodes_of_several_clusters_while_the_upstream_is_gone(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with Hub() as hub:
            hub.repo("org/model").commit(MODEL)
            cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
            stack.enter_context(cluster.mirror())
            mirror_id = mirrored(cluster.shell("operator"))
        for name in ("east", "west"):
            node = stack.enter_context(cluster.agent(name, BDN_AGENT_CLUSTER=name))
            (mount,) = node.told("bdn", "stage", mirror_id, "--job", "train")["mounts"]
            assert tree(Path(mount["path"])) == MODEL
            assert mount["bytes_from"] == {"node": REPEATED, "cluster": 0, "mirror": SIZE - REPEATED}


def test_a_dry_run_says_what_would_move(node: Shell, upstream: Hub) -> None:
    upstream.repo("org/planned").commit({"one": b"1" * 1000, "two": b"2" * 2000})
    planned = node.told("bdn", "mirror", "hf://org/planned", "--dry-run")

    assert (planned["files"], planned["bytes_to_transfer"]) == (2, 3000)
    assert "org/planned" not in node.run("bdn-admin", "ls").out
    assert upstream.log.bytes_served(origin="cdn") == 0


@pytest.mark.promise("corruption")
def test_a_path_of_a_stage_is_verified_by_the_agent_of_its_node(node: Shell, tally: Tally) -> None:
    stage = node.run("bdn", "stage", mirrored(node), "--job", "train", "--json").document
    view = Path(stage["mounts"][0]["path"])
    path = view / "deep/model.safetensors"
    held = next(file for file in (node.data / "cache/files").glob("??/*") if file.samefile(path))
    flip(held, CHUNK_SIZE + 7)
    wrong = path.read_bytes()

    looked = node.run("bdn-admin", "verify", str(path), "--no-repair", "--json")
    assert (looked.code, [item["outcome"] for item in looked.document["items"]]) == (1, ["damaged"]), looked.err
    assert path.read_bytes() == wrong != MODEL["deep/model.safetensors"]

    mended = node.run("bdn-admin", "verify", str(path), "--json")
    assert (mended.code, [item["outcome"] for item in mended.document["items"]]) == (0, ["repaired"]), mended.err
    assert mended.document["items"][0]["sources"] == ["hf://org/model"]
    assert tree(view) == MODEL

    whole = node.run("bdn-admin", "verify", str(view))
    assert (whole.code, "0 repaired, 0 damaged" in whole.out) == (0, True), whole.out
    for nothing in (node.data / "nothing", path / "below", path.with_name("other")):
        assert node.run("bdn-admin", "verify", str(nothing)).code == 4
    assert node.run("bdn-admin", "verify", str(path), "--all").code == 2
    tally.add(scenarios=3, faults=1, repaired=1, refused=4)


@pytest.mark.production
def test_what_was_prefetched_is_staged_without_moving_a_byte(node: Shell) -> None:
    mirrored = node.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait", "--json").document

    for what in ("hf://org/model", mirrored["id"], mirrored["sources"][0]["manifest"]):
        done = node.run("bdn-admin", "prefetch", what, "--cluster", "default", "--wait", "--json")
        assert (done.code, done.document["status"]) == (0, "READY"), done.out + done.err
        (part,) = done.document["nodes"]
        assert (part["node"], part["state"], part["bytes_total"]) == ("node-1", "READY", SIZE)
        came = {"node": REPEATED, "cluster": 0, "mirror": SIZE - REPEATED} if what == "hf://org/model" else None
        assert part["bytes_from"] == (came or {"node": SIZE, "cluster": 0, "mirror": 0})

    held = node.run("bdn-admin", "ls", "--json").document["items"][0]["nodes"]["default/node-1"]
    assert (held["bytes"], held["held_by"]) == (SIZE, [])
    stage = node.run("bdn", "stage", mirrored["id"], "--job", "train", "--warm", "--json").document
    (mount,) = stage["mounts"]
    assert stage["warm"]["bytes_total"] == SIZE
    assert mount["bytes_from"] == {"node": SIZE, "cluster": 0, "mirror": 0}
    assert tree(Path(mount["path"])) == MODEL


def test_the_exit_code_of_a_prefetch_tells_why_it_failed(node: Shell, services: tuple[Cluster, Shell]) -> None:
    mirrored(node)
    with services[0].agent("small", BDN_AGENT_CACHE_BYTES="1MB"):
        done = node.run("bdn-admin", "prefetch", "hf://org/model", "--node", "small", "--wait", "--json")
    assert (done.code, done.document["status"]) == (1, "FAILED"), done.out + done.err
    assert done.document["nodes"][0]["error"]["code"] == "CACHE_TOO_SMALL"
    unknown = (
        ("hf://org/other", "--node", "node-1"),
        (f"b3:{'0' * 64}", "--node", "node-1"),
        ("hf://org/model", "--node", "nobody"),
        ("hf://org/model", "--cluster", "nowhere"),
    )
    assert [node.run("bdn-admin", "prefetch", *arguments).code for arguments in unknown] == [4] * 4
    assert node.run("bdn-admin", "prefetch", "hf://org/model").code == 2  # where to?


@pytest.mark.production
def test_the_mirror_s_log_tells_of_its_start_and_of_what_it_did_in_one_form(
    node: Shell, services: tuple[Cluster, Shell]
) -> None:
    mirror_id = mirrored(node)
    log = (services[0].root / "mirror/bdn-serve.log").read_text().splitlines()
    said = [fields_of(line) for line in log if not line.startswith("mirror at ")]  # its standard output

    (started,) = [one for one in said if one["msg"] == "mirror started"]
    assert (started["url"], started["auth"]) == (services[0].url, "off")
    database = behind(services[0].root / "mirror/data").database_url
    assert urlsplit(started["database"]).path == urlsplit(database).path
    (ready,) = [one for one in said if one["msg"] == "mirror ready" and one["mirror"] == mirror_id]
    assert int(ready["bytes"]) == SIZE
    assert "evicted" in {one["msg"] for one in said if one.get("tier") == "mirror"}
