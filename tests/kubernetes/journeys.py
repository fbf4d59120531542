"""What users and operators do on the cluster, and what they see: one document of the report for each journey.

A volume of five minutes is published meanwhile; the other journeys run beside it, before the agents are rolled out anew.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from bdn.net.api_clients import MirrorClient
from tests.doubles.content import Content, GeneratedContent
from tests.doubles.faults import Throttle, throttled
from tests.kubernetes.api import Json, until
from tests.kubernetes.cluster import DRIVER, GLANCE, MIRROR, Cluster
from tests.kubernetes.nodes import listening_ports, status_of
from tests.kubernetes.training import trained

MODEL_SIZE: Final = 64 * 1024**2
MODEL: Final[Mapping[str, Content]] = {"config.json": b"{}", "deep/model.safetensors": GeneratedContent(MODEL_SIZE, 1)}
# Two chunks: they take two of the four requests that the mirror begins with at a host, and leave the others to other models.
SLOW_SIZE: Final = 16 * 1024**2
SLOW: Final[Mapping[str, Content]] = {"config.json": b"{}", "slow.safetensors": GeneratedContent(SLOW_SIZE, 2)}
SLOW_SECONDS: Final = 300.0
LARGE: Final = {"large.safetensors": GeneratedContent(600 * 1024**2, 4)}  # than the cache of an agent here
SOURCE: Final = {"source": "hf://org/model@main"}
CROWDS: Final = (1, 10, 50)
READERS: Final = ("inline", "second", "other", "claim", "slow")
Journey = Callable[[Cluster], Awaitable[Json]]


async def slow(cluster: Cluster) -> Json:
    """A volume that takes longer than two calls of the kubelet."""
    throttle = Throttle(SLOW_SIZE / SLOW_SECONDS)
    cluster.hub.repo("org/slow").commit(SLOW)
    cluster.hub.fail(throttled(throttle), "slow.safetensors", origin="cdn", times=None)
    node = cluster.nodes[0]
    await cluster.run_inline("slow", {"source": "hf://org/slow"}, node=node)
    await cluster.running("slow")
    after = time.monotonic() - throttle.ended_at
    uid = (await cluster.api.pod("slow"))["metadata"]["uid"]
    return {
        "after_last_byte_seconds": after,
        "publish_seconds": node.published()["slow"],
        "calls": await cluster.calls(node, uid),
        "fetched": cluster.hub.log.bytes_served("slow.safetensors", origin="cdn") / SLOW_SIZE,
        **await cluster.reads("slow"),
    }


async def shared(cluster: Cluster) -> Json:
    """The first pod, the second on its node, and one on the other node. Nothing else is staged meanwhile."""
    first, other = cluster.nodes
    before = await cluster.served_bytes()
    report: Json = {}
    for name, node in (("inline", first), ("second", first), ("other", other)):
        await cluster.run_inline(name, SOURCE, node=node)
        report[name] = await cluster.reads(name)
        report[name]["publish_seconds"] = node.published()[name]
    report["served"] = (await cluster.served_bytes() - before) / MODEL_SIZE
    return report


async def claim(cluster: Cluster) -> Json:
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    source = {"driver": DRIVER, "volumeHandle": "model-main", "volumeAttributes": SOURCE}
    of_volume = {"capacity": {"storage": "1Gi"}, "claimRef": {"namespace": "default", "name": "model"}, "csi": source}
    of_claim = {"volumeName": "model", "resources": {"requests": {"storage": "1Gi"}}}
    for kind, spec in (("PersistentVolume", of_volume), ("PersistentVolumeClaim", of_claim)):
        document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "model"}, "spec": {**common, **spec}}
        await cluster.api.create(document)

    async def is_bound() -> bool:
        found = await cluster.api.get("/api/v1/namespaces/default/persistentvolumeclaims/model")
        return bool(found["status"]["phase"] == "Bound")

    await until(is_bound)
    await cluster.run_pod("claim", {"persistentVolumeClaim": {"claimName": "model"}}, node=cluster.nodes[0])
    return await cluster.reads("claim")


async def refused(cluster: Cluster) -> Json:
    node = cluster.nodes[0]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "hf_x"}}
    await cluster.api.create(secret)
    await cluster.run_inline("revision", {"source": "hf://org/model@none"}, node=node)
    await cluster.run_inline("publish-secret", SOURCE, node=node, secret="hub")
    await cluster.run_inline("no-secret", {**SOURCE, "secretName": "none"}, node=node)
    cluster.hub.repo("org/large").commit(LARGE)
    await cluster.run_inline("large", {"source": "hf://org/large"}, node=node)
    codes = {
        "revision": "REVISION_NOT_FOUND",
        "publish-secret": "INVALID_REQUEST",
        "no-secret": "SECRET_NOT_FOUND",
        "large": "CACHE_TOO_SMALL",
    }
    events = {name: await cluster.refused(name, code) for name, code in codes.items()}
    await cluster.deleted(*codes)
    return events


async def foreign(cluster: Cluster) -> Json:
    """A mirror of one namespace, named by a pod of another one, and by a pod of its own."""
    node = cluster.nodes[0]
    await cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant"}})
    await until(lambda: _has_account(cluster, "tenant"))
    await cluster.run_inline("theirs", SOURCE, node=node, namespace="tenant")
    await cluster.running("theirs", "tenant")
    pod = (await cluster.api.pod("theirs", "tenant"))["metadata"]["uid"]
    async with MirrorClient(MIRROR, cluster.token) as client:
        (stage,) = [each for each in (await cluster.nodes[0].open_stages()) if pod in each.job_id]
        (mirror,) = [each.mirror_id for each in (await client.stages(stage.job_id)).items]
    await cluster.run_inline("foreign", {"mirror": str(mirror)}, node=node)
    await cluster.run_inline("own", {"mirror": str(mirror)}, node=node, namespace="tenant")
    event = await cluster.refused("foreign", "NOT_FOUND")
    own = await cluster.reads("own", "tenant")
    await cluster.deleted("foreign")
    return {"event": event, "own": own}


async def _has_account(cluster: Cluster, namespace: str) -> bool:
    found = await cluster.api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts")
    return any(each["metadata"]["name"] == "default" and each.get("secrets") for each in found["items"])


async def deleted(cluster: Cluster) -> Json:
    """A pod that is deleted while its volume is copied."""
    node = cluster.nodes[0]
    cluster.hub.repo("org/waiting").commit({"waiting.safetensors": GeneratedContent(8 * 1024**2, 3)})
    cluster.hub.fail(throttled(Throttle(15_000)), "waiting.safetensors", origin="cdn", times=None)
    await cluster.run_inline("waiting", {"source": "hf://org/waiting"}, node=node)
    await asyncio.to_thread(cluster.hub.log.wait_for, "waiting.safetensors")
    uid = (await cluster.api.pod("waiting"))["metadata"]["uid"]
    began = time.monotonic()
    await cluster.deleted("waiting")
    return {
        "seconds": time.monotonic() - began,
        "calls": await cluster.calls(node, uid),
        "left": await cluster.left(uid),
    }


async def crowd(cluster: Cluster) -> Json:
    """Pods that are created at once, whose model the nodes have."""
    report: Json = {}
    for count in CROWDS:
        names = [f"crowd-{count}-{number}" for number in range(count)]
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(names):
                node = cluster.nodes[number % len(cluster.nodes)]
                group.create_task(cluster.run_inline(name, SOURCE, node=node, script=GLANCE))

        async def all_run(names: list[str] = names) -> bool:
            pods = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in await cluster.api.pods()}
            return all(pods[name] == "Running" for name in names)

        await until(all_run)
        seconds = time.monotonic() - began
        nodes = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in await cluster.api.pods()}
        published = {name: seconds for node in cluster.nodes for name, seconds in node.published().items()}
        report[str(count)] = {
            "seconds": seconds,
            "publish_seconds": [published[name] for name in names],
            "nodes": sorted({nodes[name] for name in names}),
            "read": sorted({line for name in names for line in (await cluster.log_of(name, 1))}),
        }
        await cluster.deleted(*names)
    return report


async def rebooted(cluster: Cluster) -> Json:
    """The second node loses its power, and gets it back; its disk stays."""
    node = cluster.nodes[1]

    async def restarts() -> int:
        return int((await cluster.api.pod("other"))["status"]["containerStatuses"][0]["restartCount"])

    before = (await cluster.reads("other"))["main"]
    await node.cut_power()
    await node.start()
    began = time.monotonic()

    async def is_back() -> bool:
        return await restarts() == 1

    await until(is_back)
    back = {**await cluster.reads("other"), "seconds": time.monotonic() - began}
    await cluster.run_inline("after-reboot", SOURCE, node=node)
    return {"before": before, "back": back, "restarts": await restarts(), "new": await cluster.reads("after-reboot")}


async def confined(cluster: Cluster) -> Json:
    """Ports and capabilities of the containers."""
    report: Json = {}
    for node in cluster.nodes:
        agent, driver = node.pid_of("bdn-node-agent", "BDN_AGENT_NODE"), node.pid_of("bdn-csi", "BDN_CSI_NODE")
        status = status_of(agent)
        report[node.name] = {
            "driver": listening_ports(driver),
            "agent": listening_ports(agent),
            "uid": status["Uid"].split(),
            "capabilities": {name: value for name, value in status.items() if name.startswith("Cap")},
            "no_new_privileges": status["NoNewPrivs"],
        }
    return report


async def rolled(cluster: Cluster) -> Json:
    """All agents and drivers are replaced while pods read."""
    before = {name: pod["metadata"]["uid"] for name, pod in (await cluster.agent_pods()).items()}
    began = time.monotonic()
    await cluster.kubectl("-n", "bdn", "rollout", "restart", "daemonset/agent")
    await cluster.kubectl("-n", "bdn", "rollout", "status", "daemonset/agent")
    await cluster.agents_ready()
    seconds = time.monotonic() - began
    replaced = [name for name, pod in (await cluster.agent_pods()).items() if pod["metadata"]["uid"] != before[name]]
    after: Json = {}
    for node in cluster.nodes:
        await cluster.run_inline(f"after-{node.name}", SOURCE, node=node)
        after[node.name] = await cluster.reads(f"after-{node.name}")
    logs = {name: await cluster.log_of(name, 3) for name in READERS}
    running = [name for name in READERS if (await cluster.api.pod(name))["status"]["phase"] == "Running"]
    return {"seconds": seconds, "replaced": sorted(replaced), "after": after, "logs": logs, "running": running}


async def emptied(cluster: Cluster) -> Json:
    """All pods with volumes are deleted."""
    began = time.monotonic()
    for namespace in ("default", "tenant"):
        names = [pod["metadata"]["name"] for pod in await cluster.api.pods(namespace)]
        await cluster.deleted(*names, namespace=namespace)
    return {
        "seconds": time.monotonic() - began,
        "stages": [stage.job_id for node in cluster.nodes for stage in await node.open_stages()],
        "volumes": [each for node in cluster.nodes for each in node.volumes()],
    }


JOURNEYS: Final = (slow, shared, claim, refused, foreign, deleted, trained, crowd, rebooted, confined, rolled, emptied)


async def travel(cluster: Cluster) -> Json:
    """Each journey, at once where they do not disturb each other. Returns the report."""
    report: Json = {}
    began = time.monotonic()

    async def one(journey: Journey) -> None:
        try:
            report[journey.__name__] = {"began": time.monotonic() - began, **await journey(cluster)}
        except Exception:
            report[journey.__name__] = {"error": traceback.format_exc()}
        report[journey.__name__]["ended"] = time.monotonic() - began
        (cluster.folder / "report.json").write_text(json.dumps(report, indent=1))

    async def together(*journeys: Journey) -> None:
        async with asyncio.TaskGroup() as group:
            for journey in journeys:
                group.create_task(one(journey))

    async def alone() -> None:
        await together(claim, refused, foreign, trained)
        for journey in (crowd, rebooted):
            await one(journey)

    async def fast() -> None:
        await one(shared)
        async with asyncio.TaskGroup() as group:
            group.create_task(one(deleted))  # waits for a call of the kubelet, as slow does
            group.create_task(alone())

    cluster.hub.repo("org/model").commit(MODEL)
    async with asyncio.TaskGroup() as group:
        group.create_task(one(slow))
        group.create_task(fast())
    logs = await cluster.logs()
    for journey in (confined, rolled, emptied):
        await one(journey)
    return {**report, "logs": logs + await cluster.logs()}
