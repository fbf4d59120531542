"""A cluster on which BDN is installed as docs/kubernetes.md says: pods with volumes, and what they see."""

import asyncio
import secrets
import shutil
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from bdn.core.errors import BdnError
from tests.doubles.hub import Hub
from tests.kubernetes.api import Api, Json, until
from tests.kubernetes.images import BDN, BUSYBOX
from tests.kubernetes.nodes import HERE, Node, json_lines

ROOT: Final = HERE.parents[1]
DRIVER: Final = "csi.bdn.dev"
MIRROR: Final = "http://10.96.0.50:8460"  # its Service
HOST: Final = "10.77.0.1"  # as pods reach it
LIST: Final = "cd /w && busybox find * -type f | busybox sort | busybox xargs busybox sha256sum"
READ: Final = (
    f"{LIST}; busybox touch /w/x 2>/dev/null; echo write=$?; "
    "while busybox cat $(busybox find /w -type f) >/dev/null; do busybox sleep 0.5; done; echo read failed; busybox sleep 100000"
)
GLANCE: Final = "busybox sha256sum /w/config.json; busybox sleep 100000"


@dataclass
class Cluster:
    folder: Path
    binaries: Path
    base: Path
    hub: Hub
    api: Api
    nodes: list[Node]
    token: str = field(default_factory=lambda: secrets.token_hex(32))  # of the mirror's operator

    async def kubectl(self, *arguments: str) -> str:
        command = [str(self.base / "kubectl"), f"--kubeconfig={self.folder / 'kubeconfig'}", *arguments]
        running = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await running.communicate()
        assert running.returncode == 0, f"{' '.join(arguments)}: {err.decode()}"
        return out.decode()

    async def run_pod(
        self,
        name: str,
        volume: Mapping[str, Any],
        *,
        node: Node | None = None,
        script: str = READ,
        namespace: str = "default",
    ) -> None:
        """A pod whose containers see the volume at /w; with the script READ, an init container, too."""
        one = {
            "image": BUSYBOX,
            "imagePullPolicy": "Never",
            "volumeMounts": [{"name": "w", "mountPath": "/w", "readOnly": True}],
        }
        spec = {
            "terminationGracePeriodSeconds": 1,
            "enableServiceLinks": False,
            "dnsPolicy": "Default",
            "securityContext": {"fsGroup": 2000},
            "nodeSelector": {"kubernetes.io/hostname": node.name} if node else {},
            "initContainers": [{"name": "init", "command": ["/bin/sh", "-c", LIST], **one}] if script == READ else [],
            "containers": [{"name": "main", "command": ["/bin/sh", "-c", script], **one}],
            "volumes": [{"name": "w", **volume}],
        }
        await self.api.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        )

    async def run_inline(
        self, name: str, attributes: Mapping[str, str], *, secret: str | None = None, **given: Any
    ) -> None:
        source: Json = {"driver": DRIVER, "readOnly": True, "volumeAttributes": dict(attributes)}
        if secret is not None:
            source["nodePublishSecretRef"] = {"name": secret}
        await self.run_pod(name, {"csi": source}, **given)

    async def running(self, name: str, namespace: str = "default") -> None:
        async def condition() -> bool:
            pod = await self.api.pod(name, namespace)
            return pod["status"]["phase"] == "Running" and all(
                each["ready"] for each in pod["status"]["containerStatuses"]
            )

        await until(condition)

    async def reads(self, name: str, namespace: str = "default") -> Json:
        """What a pod with the script READ wrote once it runs."""
        await self.running(name, namespace)
        main = await self.log_of(name, 3, namespace)
        init = (await self.api.log(name, "init", namespace)).splitlines()
        return {"init": init, "main": main, "events": await self.api.events(name, namespace)}

    async def log_of(self, name: str, lines: int, namespace: str = "default") -> list[str]:
        """The log of the container "main", once it has so many lines."""

        async def condition() -> bool:
            return len((await self.api.log(name, "main", namespace)).splitlines()) >= lines

        await until(condition)
        return (await self.api.log(name, "main", namespace)).splitlines()

    async def logs(self) -> str:
        """Of all containers of BDN, also of those before a restart."""
        parts = []
        for pod in await self.api.pods("bdn"):
            name = pod["metadata"]["name"]
            for container in pod["spec"]["containers"]:
                for previous in ("true", "false"):
                    path = f"/api/v1/namespaces/bdn/pods/{name}/log"
                    parts.append(await self.api.text(path, container=container["name"], previous=previous))
        return "\n".join(parts)

    async def refused(self, name: str, code: str, namespace: str = "default") -> str:
        """The event with this code."""

        async def found() -> list[str]:
            return [event for event in await self.api.events(name, namespace) if code in event]

        await until(found)
        return (await found())[0]

    async def deleted(self, *names: str, namespace: str = "default") -> None:
        """Delete pods. Returns once nothing of their volumes is left: the kubelet may take a minute more to remove the pods from the API."""
        uids = [pod["metadata"]["uid"] for pod in await self.api.pods(namespace) if pod["metadata"]["name"] in names]
        for name in names:
            await self.api.delete_pod(name, namespace)

        async def condition() -> bool:
            try:
                return not await self.left(*uids)
            except (AssertionError, LookupError, OSError, BdnError):  # a node is without power, or without an agent
                return False

        await until(condition)

    async def left(self, *uids: str) -> list[str]:
        """Stages, mounts and directories of the pods of these uids."""
        found = [each for node in self.nodes for each in node.volumes()]
        found += [stage.job_id for node in self.nodes for stage in await node.open_stages()]
        return [each for each in found if any(uid in each for uid in uids)]

    async def agent_pods(self) -> dict[str, Json]:
        """The DaemonSet's pods, by node."""
        found = await self.api.pods("bdn", labelSelector="app.kubernetes.io/name=bdn-agent")
        return {pod["spec"].get("nodeName", ""): pod for pod in found if "deletionTimestamp" not in pod["metadata"]}

    async def calls(self, node: Node, uid: str) -> list[str]:
        """What the driver wrote about each call for the pod of this uid."""
        pod = (await self.agent_pods())[node.name]
        lines = json_lines(await self.api.log(pod["metadata"]["name"], "csi", "bdn"))
        return [line["msg"] for line in lines if uid in line.get("target", "")]

    async def agents_ready(self) -> None:
        """Agents and drivers serve on all nodes."""

        async def condition() -> bool:
            pods = await self.agent_pods()
            statuses = [pods.get(node.name, {}).get("status", {}).get("containerStatuses", []) for node in self.nodes]
            drivers = (await self.api.get("/apis/storage.k8s.io/v1/csinodes"))["items"]
            registered = [
                one for one in drivers if any(each["name"] == DRIVER for each in one["spec"].get("drivers") or [])
            ]
            is_ready = all(len(each) == 2 and all(one["ready"] for one in each) for each in statuses)
            return is_ready and len(registered) == len(self.nodes)

        await until(condition)

    async def serves(self) -> bool:
        """Whether the mirror's Service leads to it: the proxy learns that later than we do."""
        try:
            return await self.served_bytes() == 0
        except httpx2.TransportError:
            return False

    async def is_whole(self) -> bool:
        """Whether each agent knows all others: then each chunk has one owner."""
        return [await node.owners() for node in self.nodes] == [len(self.nodes)] * len(self.nodes)

    async def served_bytes(self) -> int:
        """What the mirror has sent to agents so far."""
        async with httpx2.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"{MIRROR}/metrics")).raise_for_status().text
        line = next(one for one in page.splitlines() if one.startswith("bdn_mirror_served_bytes_total"))
        return int(float(line.split()[1]))


def _edited(clusters: str) -> str:
    """As the page says: the cluster's issuer, the image as nodes have it, and the mirror's address, for want of a name server."""
    edits = {
        'issuer = "https://kubernetes.default.svc.cluster.local"': 'issuer = "https://kubernetes.default.svc"',
        'image = "bdn:0.1.0"': f'image = "{BDN}"',
        'url = "http://mirror.bdn.svc:8460"': f'url = "{MIRROR}"',
    }
    for before, after in edits.items():
        assert before in clusters, before
        clusters = clusters.replace(before, after)
    return clusters


async def install(cluster: Cluster) -> None:
    """As docs/kubernetes.md says, with an overlay of the tests."""
    deploy = cluster.folder / "kubernetes"
    shutil.copytree(ROOT / "deploy/kubernetes", deploy)
    overlay = deploy / "overlays/rig"
    shutil.copytree(HERE / "overlay", overlay)
    patch = overlay / "mirror.yaml"
    patch.write_text(patch.read_text().replace("HUB", cluster.hub.url))
    clusters = deploy / "components/training-jobs/kubernetes.toml"
    clusters.write_text(_edited(clusters.read_text()))
    await cluster.kubectl("create", "namespace", "bdn")
    secrets_key = b64encode(secrets.token_bytes(32)).decode()
    keys = [f"--from-literal=token={cluster.token}", f"--from-literal=secrets-key={secrets_key}"]
    await cluster.kubectl("-n", "bdn", "create", "secret", "generic", "bdn-mirror", *keys)
    await cluster.kubectl("apply", "-k", str(overlay))
    await cluster.agents_ready()
    await cluster.kubectl("-n", "bdn", "rollout", "status", "deployment/mirror")
    await until(cluster.serves)
    await until(cluster.is_whole)
