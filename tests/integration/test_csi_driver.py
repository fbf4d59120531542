"""The CSI driver between a kubelet and real services: what pods read, and what becomes of a volume that waits, fails or goes."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.doubles.hub import Hub
from tests.support.agent.csi_node import CsiNode, node_folder
from tests.support.agent.kubelet import OK
from tests.support.agent.mounts import needs_mounts
from tests.support.agent.process import Daemon
from tests.support.content.trees import tree
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK

pytestmark = needs_mounts
MODEL = {"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 40_000, "empty.txt": b""}
SOURCE = {"source": "hf://org/model@main"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as double:
        double.repo("org/model").commit(MODEL)
        yield double


@pytest.fixture
async def node(hub: Hub, tmp_path: Path) -> AsyncIterator[CsiNode]:
    environ = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
    with node_folder() as folder:
        async with await ServingProcess.start(tmp_path / "mirror", **environ) as mirror:
            yield CsiNode(folder, mirror.url)


@pytest.fixture
async def agent(node: CsiNode) -> AsyncIterator[Daemon]:
    async with node.agent.daemon() as daemon:
        yield daemon


async def test_volume__published__shows_the_sources_tree_read_only_and_outlives_the_agent(
    node: CsiNode, agent: Daemon
) -> None:
    pod = node.pod()
    async with node.driver():
        assert await pod.publish(SOURCE) == OK, node.log
        assert tree(pod.target) == MODEL
        for path in ("config.json", "new"):
            with pytest.raises(OSError, match="Read-only file system"):
                (pod.target / path).write_bytes(b"mine")

        await agent.kill()
        assert tree(pod.target) == MODEL
        with pytest.raises(OSError, match="Read-only file system"):
            (pod.target / "config.json").unlink()
