"""``bdn-admin why``, as an operator runs it, against a mirror and an agent in processes of their own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.promises.tally import Tally
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

pytestmark = pytest.mark.promise("leases")
SIZE = 2_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as double:
        yield double


def staged(node: Shell, source: str, job: str) -> tuple[str, str, str]:
    """Manifest, stage and path."""
    mirrored = node.run("bdn", "mirror", source, "--mount", "/app/model", "--wait", "--json").document
    stage = node.run("bdn", "stage", mirrored["id"], "--job", job, "--json").document
    assert stage["state"] == "READY", stage
    return mirrored["sources"][0]["manifest"], stage["id"], stage["mounts"][0]["path"]


def test_an_operator_hears_why(tmp_path: Path, hub: Hub, tally: Tally) -> None:
    for name in ("one", "two"):
        content = random.Random(name).randbytes(SIZE)
        hub.repo(f"org/{name}").commit({"config.json": b"{}", "deep/model.safetensors": content})
    code = {"PYTHONPATH": str(Path(__file__).parents[2])}
    cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url, **code})
    with cluster.mirror(), cluster.agent(BDN_AGENT_CACHE_BYTES="3MB", BDN_AGENT_ROLES="node") as node:
        one, first, _ = staged(node, "hf://org/one", "job-one")
        assert node.run("bdn", "unstage", first).code == 0
        two, second, path = staged(node, "hf://org/two", "job-two")

        def why(*arguments: str) -> str:
            done = node.run("bdn-admin", "why", *arguments)
            assert done.code == 0, done.out + done.err
            return done.out

        said, told = "is not cached on node default/node-1 because at ", [""]

        def is_told() -> bool:
            told.append(why("hf://org/one"))
            return said in told[-1]

        wait_until(is_told, what="the agent's events")
        assert f"{one[:15]}… {said}" in told[-1]
        assert f"to make room for job job-two (stage {second}), which brought {two}" in told[-1]
        assert f"{one[:15]}… is cached on the mirror because at " in told[-1]
        assert "was mirrored from hf://org/one at " in told[-1]
        document = node.run("bdn-admin", "why", two, "--node", "node-1", "--json").document
        assert [(place["place"], place["cached"]) for place in document["places"]] == [("node default/node-1", True)]

        shown = why(f"{path}/deep/model.safetensors")
        assert "is deep/model.safetensors (b3:" in shown
        assert f"stage {second} of job job-two is READY, and leases it until it is released" in shown
        assert "2 MB from the mirror" in shown
        assert "was READY for job job-two" in shown
        for unknown in ("hf://org/three", f"{path}/nothing"):
            assert node.run("bdn-admin", "why", unknown).code == 4, unknown
    tally.add(scenarios=5, refused=2)
