"""Prefetches by command: a real mirror, real agents, and stages that then find everything on their node."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell

MODEL = {
    "config.json": b"{}",
    "deep/model.safetensors": random.Random(1).randbytes(17_000_000),
    "empty.txt": b"",
    "small/one.bin": b"one" * 999,
}
SIZE = sum(len(content) for content in MODEL.values())


@pytest.fixture
def node(tmp_path: Path, hub: Hub) -> Iterator[Shell]:
    """A node whose mirror is ready."""
    hub.repo("org/model").commit(MODEL)
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
    with cluster.mirror(), cluster.agent() as shell:
        yield shell


def test_what_was_prefetched_is_staged_without_moving_a_byte(node: Shell) -> None:
    mirrored = node.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait", "--json").document

    for what in ("hf://org/model", mirrored["id"], mirrored["sources"][0]["manifest"]):
        done = node.run("bdn-admin", "prefetch", what, "--cluster", "default", "--wait", "--json")
        assert (done.code, done.document["status"]) == (0, "READY"), done.out + done.err
        (part,) = done.document["nodes"]
        assert (part["node"], part["state"], part["bytes_total"]) == ("node-1", "READY", SIZE)
        came = {"node": 0, "cluster": 0, "mirror": SIZE} if what == "hf://org/model" else None
        assert part["bytes_from"] == (came or {"node": SIZE, "cluster": 0, "mirror": 0})

    held = node.run("bdn-admin", "ls", "--json").document["items"][0]["nodes"]["default/node-1"]
    assert (held["bytes"], held["held_by"]) == (SIZE, [])
    (mount,) = node.run("bdn", "stage", mirrored["id"], "--job", "train", "--json").document["mounts"]
    assert mount["bytes_from"] == {"node": SIZE, "cluster": 0, "mirror": 0}
    assert tree(Path(mount["path"])) == MODEL


def test_the_exit_code_tells_a_node_without_room_from_what_nobody_knows(tmp_path: Path, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url})
    with cluster.mirror(), cluster.agent(BDN_AGENT_CACHE_BYTES="1MB") as shell:
        shell.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait")

        done = shell.run("bdn-admin", "prefetch", "hf://org/model", "--node", "node-1", "--wait", "--json")

        assert (done.code, done.document["status"]) == (1, "FAILED"), done.out + done.err
        assert done.document["nodes"][0]["error"]["code"] == "CACHE_TOO_SMALL"
        unknown = (
            ("hf://org/other", "--node", "node-1"),
            (f"b3:{'0' * 64}", "--node", "node-1"),
            ("hf://org/model", "--node", "nobody"),
            ("hf://org/model", "--cluster", "nowhere"),
        )
        assert [shell.run("bdn-admin", "prefetch", *arguments).code for arguments in unknown] == [4] * 4
        assert shell.run("bdn-admin", "prefetch", "hf://org/model").code == 2  # where to?
