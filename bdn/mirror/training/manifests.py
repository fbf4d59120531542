"""The objects of Kubernetes for a training job: a Job with a pod for each rank, a Service with their names, and a Secret.

BDN's containers (``prepare``, ``bdn``) and the job's (``main``) share files, and no process sees another container's.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from pydantic import JsonValue

from bdn.core.training.environment import ARCHIVE, SCRATCH, WORKSPACE
from bdn.mirror.access.clusters import PodJobs
from bdn.wire.run_schema import RegistryLogin
from bdn.wire.training_schema import TrainingJobSpec

Manifest = dict[str, JsonValue]
JOB_LABEL: Final = "bdn.dev/job"
OWNER_LABEL: Final = "bdn.dev/mirror"  # the id of the mirror's database: two mirrors may share a namespace
WANT: Final = "bdn.dev/want"  # an annotation of a pod, in a file that ``bdn-rank follow`` reads
PREPARE, MAIN, FOLLOW = "prepare", "main", "bdn"  # containers
_RUN_PLACE: Final = "/b10/run"
_RUN_BYTES: Final = "2Gi"  # what a job writes there, 1 GiB on agents, and the output that is not sent yet
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_KEPT_SECONDS: Final = 86400  # of a Job that has ended, for kubectl
_GRACE_SECONDS: Final = 60  # from SIGTERM to SIGKILL: start.sh needs half a minute
_PUSH_GRACE_SECONDS: Final = 3660  # the same where checkpoints may have to be pushed
_TOKEN_SECONDS: Final = 3600
_AUTHORITIES_FOLDER: Final = "/etc/bdn"
_AUTHORITIES: Final = "ca.crt"
_TOKEN_FOLDER: Final = "/var/run/secrets/bdn"  # noqa: S105 - a path
_DOCKER_HUB: Final = "https://index.docker.io/v1/"  # as the kubelet looks docker.io up
_DRIVER: Final = "csi.bdn.dev"
_TMP: Final = "/tmp"  # noqa: S108 - in the pod
_RESOURCES: Final[Manifest] = {"requests": {"cpu": "100m", "memory": "256Mi"}}  # of BDN's containers


@dataclass(frozen=True, slots=True)
class PodJob:
    """A job for its objects. ``mounts``: where pods see the sources of ``mirror``, and ``caches`` the paths on the claim by place."""

    run: str
    owner: str
    namespace: str
    audience: str
    jobs: PodJobs
    spec: TrainingJobSpec
    mirror: str
    mounts: tuple[str, ...]
    caches: Mapping[str, str]
    login: RegistryLogin | None = None


def name_of(run: str) -> str:
    """The name of a run's Job, Service and Secret."""
    return f"bdn-{run}"


def leader_of(run: str) -> str:
    """The name of rank 0 for the other ranks, in their own namespace."""
    return f"{name_of(run)}-0.{name_of(run)}"


def job_of(job: PodJob) -> Manifest:
    nodes = job.spec.compute.demand.nodes
    queue = {} if job.jobs.queue is None else {_QUEUE_LABEL: job.jobs.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(job.run), "namespace": job.namespace, "labels": {**_labels(job), **queue}},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {
                "metadata": {"labels": _labels(job), "annotations": {WANT: "stage"}},
                "spec": _pod(job),
            },
        },
    }


def service_of(job: PodJob, uid: str) -> Manifest:
    """The names of the ranks' pods, also before they are ready. ``uid``: of the Job, with which it is deleted."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, uid),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: job.run},
        },
    }


def secret_of(job: PodJob, login: RegistryLogin, uid: str) -> Manifest:
    """The login to the registry of the job's image, for the kubelet. ``uid``: of the Job, with which it is deleted."""
    registry = _DOCKER_HUB if login.registry == "docker.io" else login.registry
    auth = b64encode(f"{login.username}:{login.password}".encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _owned(job, uid),
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": b64encode(json.dumps({"auths": {registry: {"auth": auth}}}).encode()).decode()},
    }


def _labels(job: PodJob) -> Manifest:
    return {JOB_LABEL: job.run, OWNER_LABEL: job.owner, "app.kubernetes.io/managed-by": "bdn"}


def _owned(job: PodJob, uid: str) -> Manifest:
    name = name_of(job.run)
    owner: Manifest = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    return {"name": name, "namespace": job.namespace, "labels": _labels(job), "ownerReferences": [owner]}


def _pod(job: PodJob) -> Manifest:
    name, demand = name_of(job.run), job.spec.compute.demand
    gpu = job.jobs.gpu(demand.gpu_type or "") if demand.gpus else None
    ours: Manifest = {"matchLabels": {JOB_LABEL: job.run}}
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _PUSH_GRACE_SECONDS if job.spec.runtime.checkpointing else _GRACE_SECONDS,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "kubernetes.io/hostname", "labelSelector": ours}
                ]
            }
        },
        "initContainers": [_bdn(job, PREPARE, PREPARE)],
        "containers": [_main(job), _bdn(job, FOLLOW, "follow")],
        "volumes": list(_volumes(job)),
    }
    if job.login is not None:
        pod["imagePullSecrets"] = [{"name": name}]
    if gpu is not None:
        pod["tolerations"] = [{"key": gpu.resource, "operator": "Exists"}]  # as most clusters taint nodes with GPUs
        pod["nodeSelector"] = {**gpu.node_labels}
    return pod


# --- containers ---


def _bdn(job: PodJob, name: str, command: str) -> Manifest:
    """Root, as ``main``, whose files it reads whatever their modes; without any other privilege."""
    plain = {"BDN_URL": job.jobs.url, "BDN_AGENT_TOKEN_FILE": f"{_TOKEN_FOLDER}/token", "BDN_RUN": job.run}
    if job.jobs.url_ca is not None:
        plain["BDN_TLS_CA"] = f"{_AUTHORITIES_FOLDER}/{_AUTHORITIES}"
    fields = {"BDN_NODE": "spec.nodeName", "BDN_POD_UID": "metadata.uid"}
    env: list[JsonValue] = [{"name": variable, "value": value} for variable, value in plain.items()]
    env += [{"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}} for variable, path in fields.items()]
    return {
        "name": name,
        "image": job.jobs.image,
        "command": ["bdn-rank", command],
        "env": env,
        "resources": _RESOURCES,
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": list(_mounts_of_bdn(job, name)),
    }


def _main(job: PodJob) -> Manifest:
    """The job's own container, as user 0 like a rank of an agent."""
    compute, places = job.spec.compute, job.spec.places
    gpu = job.jobs.gpu(compute.demand.gpu_type or "") if compute.demand.gpus else None
    limits: Manifest = {
        **({} if compute.cpu_count is None else {"cpu": str(compute.cpu_count)}),
        **({} if compute.memory_bytes is None else {"memory": str(compute.memory_bytes)}),
        **({} if gpu is None else {gpu.resource: str(compute.demand.gpus)}),
    }
    return {
        "name": MAIN,
        "image": job.spec.image.base_image if job.spec.image is not None else None,
        "command": [f"{_RUN_PLACE}/start.sh", *([] if places.working is None else [places.working])],
        "resources": {"limits": limits} if limits else {},
        "securityContext": {"runAsUser": 0, "runAsGroup": 0, "allowPrivilegeEscalation": False},
        "volumeMounts": list(_mounts_of_main(job)),
    }


# --- volumes, and where containers see them ---


def _volumes(job: PodJob) -> Iterator[Manifest]:
    for name in ("rank", "workspace", "tmp", "scratch"):
        yield {"name": name, "emptyDir": {}}
    yield {"name": "run", "emptyDir": {"sizeLimit": _RUN_BYTES}}
    if (checkpointing := job.spec.runtime.checkpointing) is not None:
        size = checkpointing.size_bytes
        yield {"name": "checkpoints", "emptyDir": {} if size is None else {"sizeLimit": str(size)}}
    memory = job.spec.compute.memory_bytes
    yield {
        "name": "shm",
        "emptyDir": {"medium": "Memory", **({} if memory is None else {"sizeLimit": str(memory // 2)})},
    }
    if _lacks_loaded(job):
        yield {"name": "loaded", "emptyDir": {}}
    for number, place in enumerate(job.mounts):
        attributes: Manifest = {"mirror": job.mirror, "mountLocation": place}
        csi: Manifest = {"driver": _DRIVER, "readOnly": True, "volumeAttributes": attributes}
        yield {"name": f"mount-{number}", "csi": csi}
    if job.caches:
        yield {"name": "caches", "persistentVolumeClaim": {"claimName": job.jobs.cache_claim}}
    want: Manifest = {"path": "want", "fieldRef": {"fieldPath": f"metadata.annotations['{WANT}']"}}
    yield {"name": "podinfo", "downwardAPI": {"items": [want]}}
    if job.jobs.url_ca is not None:
        keys: list[JsonValue] = [{"key": _AUTHORITIES, "path": _AUTHORITIES}]
        yield {"name": "authorities", "configMap": {"name": job.jobs.url_ca, "items": keys}}
    token: Manifest = {"audience": job.audience, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    yield {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}}


def _mounts_of_bdn(job: PodJob, container: str) -> Iterator[Manifest]:
    place = job.spec.places.checkpoints
    if container == PREPARE or place != _TMP:
        yield _mount("rank", _TMP, subPath="tmp")  # the root file system is read-only
    yield _mount("rank", "/rank")
    yield _mount("run", "/rank/shared")
    yield _mount("token", _TOKEN_FOLDER, readOnly=True)
    if job.jobs.url_ca is not None:
        yield _mount("authorities", _AUTHORITIES_FOLDER, readOnly=True)
    if container == PREPARE:
        yield _mount("workspace", WORKSPACE)
        if ARCHIVE in job.mounts:
            yield _mount(f"mount-{job.mounts.index(ARCHIVE)}", ARCHIVE, readOnly=True)
        return
    yield _mount("podinfo", "/podinfo", readOnly=True)
    if place is not None:
        yield _mount("checkpoints", place)


def _mounts_of_main(job: PodJob) -> Iterator[Manifest]:
    places = job.spec.places
    shown = {_RUN_PLACE: "run", WORKSPACE: "workspace", _TMP: "tmp", SCRATCH: "scratch", "/dev/shm": "shm"}  # noqa: S108
    if places.checkpoints is not None:
        shown[places.checkpoints] = "checkpoints"
    yield from (_mount(name, place) for place, name in shown.items())
    for place, path in job.caches.items():
        yield _mount("caches", place, subPath=path)
    if _lacks_loaded(job):
        yield _mount("loaded", str(places.loaded), readOnly=True)
    for number, place in enumerate(job.mounts):
        if place != ARCHIVE:
            yield _mount(f"mount-{number}", place, readOnly=True)


def _mount(volume: str, place: str, **fields: JsonValue) -> Manifest:
    return {"name": volume, "mountPath": place, **fields}


def _lacks_loaded(job: PodJob) -> bool:
    """Whether the job asked for checkpoints and there is none yet: its script finds an empty directory."""
    folder = job.spec.places.loaded
    return folder is not None and not any(PurePosixPath(place).is_relative_to(folder) for place in job.mounts)
