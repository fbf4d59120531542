"""A cluster of one node with a hub, a mirror, an agent and the CSI driver: what pods see is written to a report.

``python -m tests.kubernetes.cluster FOLDER BIN`` runs it, in the namespaces of ``rig.sh``; ``FOLDER/report.json`` has a document for each journey.
"""

# ruff: noqa: ASYNC110 - other processes: there is nothing to be notified by

import asyncio
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bdn.disk.binding import mounts_below
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.kubernetes.images import NAME, write_image
from tests.support.agent.csi_node import CsiNode
from tests.support.agent.kubelet import DRIVER
from tests.support.agent.process import Daemon
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.services.forked import Process

HERE = Path(__file__).parent
MODEL = {"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 40_000}
SLOW = {"config.json": b"{}", "slow.safetensors": bytes(range(255, -1, -1)) * 40_000}
LIST = "cd /w && busybox find * -type f | busybox sort | busybox xargs busybox sha256sum"
READ = f"{LIST}; busybox touch /w/x 2>/dev/null; echo write=$?; while {LIST} >/dev/null; do busybox sleep 0.2; done; echo read failed; busybox sleep 100000"
LONGEST_SECONDS = 200.0  # more than a call of the kubelet, and a step of its back-off


@dataclass
class Cluster:
    folder: Path
    binaries: Path
    hub: Hub
    node: CsiNode
    agent: Daemon
    driver: Process
    pods: list[str] = field(default_factory=list)

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        command = [str(self.binaries / "kubectl"), f"--kubeconfig={self.folder / 'kubeconfig'}", *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=True).stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def run_pod(self, name: str, volume: Mapping[str, Any]) -> None:
        mounts = [{"name": "w", "mountPath": "/w", "readOnly": True}]
        one = {"image": NAME, "imagePullPolicy": "Never", "volumeMounts": mounts}
        spec = {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"fsGroup": 2000},
            "initContainers": [{"name": "init", "command": ["/bin/sh", "-c", LIST], **one}],
            "containers": [{"name": "main", "command": ["/bin/sh", "-c", READ], **one}],
            "volumes": [{"name": "w", **volume}],
        }
        self.pods.append(name)
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})

    def run_inline(self, name: str, attributes: Mapping[str, str], **fields: Any) -> None:
        self.run_pod(name, {"csi": {"driver": DRIVER, "readOnly": True, "volumeAttributes": attributes, **fields}})

    async def running(self, name: str) -> None:
        await self.until(lambda: self.kubectl("get", "pod", name, "-o", "jsonpath={.status.phase}") == "Running")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.3)

    def events(self, name: str) -> str:
        return self.kubectl(
            "get", "events", "--field-selector", f"involvedObject.name={name}", "-o", "jsonpath={.items[*].message}"
        )

    async def log(self, name: str, container: str, lines: int) -> list[str]:
        await self.until(lambda: len(self.kubectl("logs", name, "-c", container).splitlines()) >= lines)
        return self.kubectl("logs", name, "-c", container).splitlines()


async def reads(cluster: Cluster, name: str) -> dict[str, Any]:
    await cluster.running(name)
    return {"init": await cluster.log(name, "init", 2), "main": await cluster.log(name, "main", 3)}


async def inline(cluster: Cluster) -> dict[str, Any]:
    cluster.run_inline("inline", {"source": "hf://org/model@main"})
    return await reads(cluster, "inline")


async def claim(cluster: Cluster) -> dict[str, Any]:
    source = {"driver": DRIVER, "volumeHandle": "model-main", "volumeAttributes": {"source": "hf://org/model@main"}}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "model"},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "claimRef": {"namespace": "default", "name": "model"},
                "csi": source,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "model"},
            "spec": {**common, "volumeName": "model", "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    bound = ("get", "pvc", "model", "-o", "jsonpath={.status.phase}")
    await cluster.until(lambda: cluster.kubectl(*bound) == "Bound")
    cluster.run_pod("claim", {"persistentVolumeClaim": {"claimName": "model"}})
    return await reads(cluster, "claim")


async def refused(cluster: Cluster) -> dict[str, Any]:
    cluster.run_inline("revision", {"source": "hf://org/model@none"})
    cluster.run_inline("secret", {"source": "hf://org/model"}, nodePublishSecretRef={"name": "hub"})
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "hf_x"}})
    codes = {"revision": "REVISION_NOT_FOUND", "secret": "INVALID_REQUEST"}
    for name, code in codes.items():
        await cluster.until(lambda name=name, code=code: code in cluster.events(name))  # type: ignore[misc]
    return {name: cluster.events(name) for name in codes}


async def slow(cluster: Cluster) -> dict[str, Any]:
    """The hub stops in the middle, for longer than a call of the kubelet."""
    cluster.hub.repo("org/slow").commit(SLOW)
    cluster.hub.fail(stall(1_000_000), "slow.safetensors", origin="cdn", times=None)
    cluster.run_inline("slow", {"source": "hf://org/slow"})
    await cluster.until(lambda: "copied to the mirror" in cluster.events("slow"))
    cluster.hub.release_stalled()
    released = time.monotonic()
    await cluster.running("slow")
    return {"seconds": time.monotonic() - released, "events": cluster.events("slow"), **await reads(cluster, "slow")}


async def rolled(cluster: Cluster) -> dict[str, Any]:
    """Agent and driver are killed and replaced while pods read."""
    cluster.driver.kill()
    await cluster.driver.wait()
    await cluster.agent.kill()
    async with cluster.node.agent.daemon() as agent, cluster.node.driver():
        cluster.run_inline("after", {"source": "hf://org/model@main"})
        after = await reads(cluster, "after")
        logs = {name: cluster.kubectl("logs", name, "-c", "main") for name in ("inline", "claim", "slow")}
        names = cluster.kubectl("get", "pods", "-o", "name").split()
        began = time.monotonic()
        cluster.kubectl("delete", "--wait=false", *names)
        await cluster.until(lambda: not cluster.kubectl("get", "pods", "-o", "name"))
        gone = time.monotonic() - began
        stages = [stage.job_id for stage in await cluster.node.open_stages(agent)]
        left = [str(place) for place in mounts_below(cluster.node.kubelet.root) if "kubernetes.io~csi" in place.parts]
    return {
        "after": after,
        "logs": logs,
        "gone_seconds": gone,
        "stages": stages,
        "mounts": left,
        "driver": cluster.node.log,
    }


JOURNEYS: tuple[Callable[[Cluster], Awaitable[dict[str, Any]]], ...] = (inline, claim, refused, slow, rolled)


async def run(folder: Path, binaries: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    write_image(Path("/bin/busybox"), folder / "images/busybox.tar")
    began = time.monotonic()
    up = await asyncio.create_subprocess_exec("bash", HERE / "up.sh", folder, binaries)
    assert await up.wait() == 0, "the cluster did not come up"
    report["up_seconds"] = time.monotonic() - began
    async with AsyncExitStack() as stack:
        hub = stack.enter_context(Hub())
        hub.repo("org/model").commit(MODEL)
        given = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
        mirror = await stack.enter_async_context(await ServingProcess.start(folder / "mirror", **given))
        node = CsiNode(folder, mirror.url)
        agent = await stack.enter_async_context(node.agent.daemon())
        driver = await stack.enter_async_context(node.driver())
        cluster = Cluster(folder, binaries, hub, node, agent, driver)
        modes = {"attachRequired": False, "podInfoOnMount": True, "volumeLifecycleModes": ["Ephemeral", "Persistent"]}
        spec = {**modes, "fsGroupPolicy": "None", "tokenRequests": [{"audience": "bdn"}]}
        cluster.apply(
            {"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER}, "spec": spec}
        )
        await cluster.until(
            lambda: DRIVER in cluster.kubectl("get", "csinode", "node1", "-o", "jsonpath={.spec.drivers[*].name}")
        )
        for journey in JOURNEYS:
            try:
                report[journey.__name__] = await journey(cluster)
            except Exception:
                report[journey.__name__] = {"error": traceback.format_exc()}
        report["log"] = node.log
    return report


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "report.json").write_text(json.dumps(asyncio.run(run(place, Path(sys.argv[2]))), indent=1))
