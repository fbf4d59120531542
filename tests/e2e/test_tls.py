"""Mirror, agents and commands with TLS on every hop, as an operator sets it, and everything refused that is in the clear."""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.network.authority import new_authority
from tests.support.network.ports import free_port
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell

MODEL = {"config.json": b"{}", "model.safetensors": noise(17 * MIB + 3, 1), "other.safetensors": noise(9 * MIB + 1, 2)}
SIZE = sum(len(content) for content in MODEL.values())


@pytest.fixture
def cluster(tmp_path: Path, hub: Hub) -> Cluster:
    hub.repo("org/model").commit(MODEL)
    authority = new_authority(tmp_path, "unused")
    certificate, key = authority.issue(tmp_path, "localhost", "127.0.0.1")
    shown = {"CERT": str(certificate), "KEY": str(key)}
    return Cluster(
        tmp_path,
        {
            "HF_ENDPOINT": hub.url,
            "BDN_TLS_CA": str(authority.certificates),
            **{f"BDN_TLS_{name}": value for name, value in shown.items()},
            **{f"BDN_AGENT_TLS_{name}": value for name, value in shown.items()},
            "BDN_AGENT_TLS": "require",
        },
    )


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[list[Shell]]:
    with ExitStack() as stack:
        stack.enter_context(cluster.mirror())
        ports = [{"BDN_AGENT_PORT": str(free_port())}, {}]
        yield [stack.enter_context(cluster.agent(f"node-{at}", **port)) for at, port in enumerate(ports, 1)]


def test_what_is_mirrored_is_staged_from_peers_evicted_and_pulled_over_tls(
    cluster: Cluster, nodes: list[Shell], tmp_path: Path, hub: Hub
) -> None:
    one, two = nodes
    mirrored = one.run("bdn", "mirror", "hf://org/model", "--mount", "/app/model", "--wait", "--json")
    assert mirrored.code == 0, mirrored.err
    mounts = []
    for node in nodes:
        done = node.run("bdn", "stage", mirrored.document["id"], "--job", "train", "--json")
        assert done.code == 0, done.err
        mounts.append(done.document["mounts"][0])
        assert tree(Path(mounts[-1]["path"])) == MODEL
    taken = [mount["bytes_from"] for mount in mounts]
    assert sum(one["mirror"] for one in taken) < 2 * SIZE  # the second node has its share from the first
    assert taken[1]["cluster"] > 0

    agents = one.run("bdn-admin", "agents", "--json").document["items"]
    assert [agent["advertise"].partition("://")[0] for agent in agents] == ["https", "https"]
    trusted = ssl.create_default_context(cafile=cluster.extra["BDN_TLS_CA"])
    with httpx2.Client(trust_env=False, verify=trusted) as http:
        assert http.get(f"https://localhost:{one.extra['BDN_AGENT_PORT']}/readyz").status_code == 200
    for node, stage in zip(nodes, [mount["path"].split("/")[-3] for mount in mounts], strict=True):
        assert node.run("bdn", "unstage", stage).code == 0
    evicted = two.run("bdn-admin", "evict", "--all", "--tier", "node", "--json")
    assert (evicted.code, evicted.document["bytes_freed"]) == (0, 2 * SIZE), evicted.out + evicted.err

    beside = Shell(tmp_path / "mirror", cluster.extra, is_forked=True)  # on the mirror's data directory
    pulled = beside.run("bdn", "pull", "hf://org/model", str(tmp_path / "pulled"), "--json")
    assert pulled.code == 0, pulled.err
    assert tree(tmp_path / "pulled") == MODEL
    hub.log.clear()
    alone = Shell(tmp_path / "alone", cluster.extra, is_forked=True)  # what serves nobody else needs no TLS
    assert alone.run("bdn", "pull", "hf://org/model", str(tmp_path / "alone-pulled")).code == 0
    assert tree(tmp_path / "alone-pulled") == MODEL
