"""A cluster cache of its own, as an operator runs one: it feeds a node, and is emptied by command."""

import random
from pathlib import Path

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster

MODEL = {"config.json": b"{}", "model.safetensors": random.Random(1).randbytes(17_000_000), "small.bin": b"one" * 999}
SIZE = sum(map(len, MODEL.values()))


def test_a_node_is_fed_by_the_cluster_cache_and_the_cache_is_emptied_by_command(tmp_path: Path, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
    with (
        cluster.mirror(),
        cluster.agent("cache", BDN_AGENT_ROLES="cluster"),
        cluster.agent("node", BDN_AGENT_ROLES="node") as node,
    ):
        mirror = node.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait", "--json").document
        stage = node.run("bdn", "stage", mirror["id"], "--job", "train", "--json").document
        assert stage["mounts"][0]["bytes_from"] == {"node": 0, "cluster": SIZE, "mirror": 0}
        assert tree(Path(stage["mounts"][0]["path"])) == MODEL

        done = node.run("bdn-admin", "evict", "--source", "hf://org/model", "--tier", "cluster", "--json")
        assert done.code == 0, done.out + done.err
        (item,) = done.document["items"]
        assert (item["tier"], item["node"], item["bytes"], item["refused"]) == ("cluster", "cache", SIZE, False)
        assert not list((tmp_path / "cache" / "data").rglob("cluster/chunks/*"))
        assert tree(Path(stage["mounts"][0]["path"])) == MODEL  # what the node holds is another tier's
