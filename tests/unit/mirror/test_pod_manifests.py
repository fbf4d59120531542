"""The objects of Kubernetes for a training job: accepted by its schemas, and what each container sees and may do."""

import base64
import json
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from bdn.mirror.access.clusters import GpuNodes, PodJobs
from bdn.mirror.training.manifests import PodJob, job_of, leader_of, name_of, secret_of, service_of
from bdn.wire.run_schema import RegistryLogin
from bdn.wire.training_schema import TrainingJobSpec

RUN: Final = "0123456789"
SETTINGS: Final = PodJobs(
    image="bdn:1",
    url="http://mirror:8460",
    queue="team-a",
    cache_claim="caches",
    gpus={"H100": GpuNodes(node_labels={"nvidia.com/gpu.product": "H100"})},
)
FULL: Final[dict[str, Any]] = {
    "image": {"base_image": "python:3.11"},
    "compute": {"node_count": 4, "cpu_count": 8, "memory": "64Gi", "accelerator": {"accelerator": "h100", "count": 8}},
    "runtime": {
        "start_commands": ["python train.py"],
        "environment_variables": {"KEY": {"name": "wandb"}, "PLAIN": "hunter2"},
        "checkpointing_config": {"enabled": True, "volume_size_gib": 10, "checkpoint_path": "/mnt/mine"},
        "load_checkpoint_config": {
            "enabled": True,
            "download_folder": "/mnt/loaded",
            "checkpoints": [{"typ": "baseten_latest_checkpoint"}],
        },
    },
}
SMALL: Final[dict[str, Any]] = {
    "image": {"base_image": "busybox"},
    "runtime": {"start_commands": ["true"]},
    "enable_baseten_workdir": False,
}
LOGIN: Final = RegistryLogin(registry="docker.io", username="user", password="hunter2")


def described(spec: dict[str, Any] = FULL, settings: PodJobs = SETTINGS, **changes: Any) -> PodJob:
    given: dict[str, Any] = {
        "run": RUN,
        "owner": "f" * 32,
        "namespace": "training",
        "audience": "bdn",
        "jobs": settings,
        "spec": TrainingJobSpec.model_validate(spec),
        "mirror": "mir_1",
        "mounts": ("/models/m", "/b10/archive"),
        "caches": {"/root/.cache/user_artifacts": "org/projects/p/user_artifacts"},
        "login": LOGIN,
    }
    return PodJob(**given | changes)


def pod(job: PodJob) -> dict[str, Any]:
    made: Any = job_of(job)
    return dict(made["spec"]["template"]["spec"])


def container(job: PodJob, name: str) -> dict[str, Any]:
    spec = pod(job)
    (found,) = [one for one in (*spec["initContainers"], *spec["containers"]) if one["name"] == name]
    return dict(found)


def mounts(job: PodJob, name: str) -> dict[str, str]:
    return {one["mountPath"]: one["name"] for one in container(job, name)["volumeMounts"]}


BARE: Final = described(SMALL, PodJobs(image="bdn:1", url="http://mirror:8460"), mounts=(), caches={}, login=None)
PRIVATE: Final = SETTINGS.model_copy(update={"url": "https://mirror:8460", "url_ca": "authorities"})


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("job", [described(), described(settings=PRIVATE), BARE], ids=["full", "private", "bare"])
def test_objects__are_accepted_by_the_schemas(job: PodJob, version: str) -> None:
    for made in (job_of(job), service_of(job, "uid"), secret_of(job, LOGIN, "uid")):
        kubernetes_validate.validate(made, version, strict=True)
        assert "hunter2" not in json.dumps(made)


def test_job__is_indexed_never_repeated_and_found_by_its_labels() -> None:
    made: Any = job_of(described())
    spec = made["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        4,
        4,
        "Indexed",
        0,
    )
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    labels = made["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    service: Any = service_of(described(), "uid")
    for own in (labels, spec["template"]["metadata"]["labels"], service["metadata"]["labels"]):
        assert (own["bdn.dev/job"], own["bdn.dev/mirror"]) == (RUN, "f" * 32)
    assert service["spec"]["selector"] == {"bdn.dev/job": RUN}
    assert leader_of(RUN) == f"{name_of(RUN)}-0.{pod(described())['subdomain']}"
    assert service["metadata"]["name"] == pod(described())["subdomain"] == name_of(RUN)
    assert service["metadata"]["ownerReferences"][0]["uid"] == "uid"


def test_pod__has_one_rank_a_node_the_gpus_and_limits_of_the_job() -> None:
    spec = pod(described())
    (rule,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (rule["topologyKey"], rule["labelSelector"]["matchLabels"]) == (
        "kubernetes.io/hostname",
        {"bdn.dev/job": RUN},
    )
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    limits = container(described(), "main")["resources"]["limits"]
    assert limits == {"cpu": "8", "memory": str(64 * 1024**3), "nvidia.com/gpu": "8"}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(32 * 1024**3)}
    assert volumes["run"]["emptyDir"] == {"sizeLimit": "2Gi"}
    assert volumes["checkpoints"]["emptyDir"] == {"sizeLimit": str(10 * 1024**3)}
    assert not {"nodeSelector", "tolerations", "imagePullSecrets"} & pod(BARE).keys()
    assert container(BARE, "main")["resources"] == {}


@pytest.mark.parametrize(("job", "seconds"), [(described(), 3660), (BARE, 60)])
def test_pod__that_is_deleted__has_time_to_push_its_checkpoints(job: PodJob, seconds: int) -> None:
    assert pod(job)["terminationGracePeriodSeconds"] == seconds


def test_main__has_no_token_no_privilege_and_the_directories_of_a_rank() -> None:
    main, seen = container(described(), "main"), mounts(described(), "main")
    assert main["command"] == ["/b10/run/start.sh", "/b10/workspace"]
    assert container(BARE, "main")["command"] == ["/b10/run/start.sh"]
    assert main["securityContext"]["allowPrivilegeEscalation"] is False
    assert "env" not in main
    assert pod(described())["automountServiceAccountToken"] is False
    assert seen == {
        "/b10/run": "run", "/b10/workspace": "workspace", "/tmp": "tmp", "/mnt/bt-scratch": "scratch", "/dev/shm": "shm",
        "/mnt/mine": "checkpoints", "/root/.cache/user_artifacts": "caches", "/mnt/loaded": "loaded", "/models/m": "mount-0",
    }  # fmt: skip
    read_only = {one["mountPath"] for one in main["volumeMounts"] if one.get("readOnly")}
    assert read_only == {"/models/m", "/mnt/loaded"}
    assert "/mnt/loaded" not in mounts(described(mounts=("/mnt/loaded/rank-0/c",)), "main")


def test_containers_of_bdn__have_the_token_and_only_what_they_need_of_the_job() -> None:
    prepare, follow = (container(described(), name) for name in ("prepare", "bdn"))
    assert (prepare["command"], follow["command"]) == (["bdn-rank", "prepare"], ["bdn-rank", "follow"])
    shared = {"/tmp": "rank", "/rank": "rank", "/rank/shared": "run", "/var/run/secrets/bdn": "token"}
    assert mounts(described(), "prepare") == {**shared, "/b10/workspace": "workspace", "/b10/archive": "mount-1"}
    assert mounts(described(), "bdn") == {**shared, "/podinfo": "podinfo", "/mnt/mine": "checkpoints"}
    for one in (prepare, follow):
        env = {each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"] for each in one["env"]}
        assert env == {
            "BDN_URL": "http://mirror:8460", "BDN_AGENT_TOKEN_FILE": "/var/run/secrets/bdn/token", "BDN_RUN": RUN,
            "BDN_NODE": "spec.nodeName", "BDN_POD_UID": "metadata.uid",
        }  # fmt: skip
        assert one["image"] == "bdn:1"
        assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
    volumes = {one["name"]: one for one in pod(described())["volumes"]}
    (token,) = volumes["token"]["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == "bdn"


def test_containers_of_bdn__have_the_authorities_of_a_mirror_with_a_certificate_of_its_own() -> None:
    job = described(settings=PRIVATE)
    for name in ("prepare", "bdn"):
        (file,) = [one["value"] for one in container(job, name)["env"] if one["name"] == "BDN_TLS_CA"]
        folder, _, key = file.rpartition("/")
        (volume,) = [one for one in pod(job)["volumes"] if one["name"] == mounts(job, name)[folder]]
        assert volume["configMap"] == {"name": "authorities", "items": [{"key": "ca.crt", "path": key}]}
    assert "authorities" not in mounts(job, "main").values()


def test_volumes_of_the_mirror__are_read_only_and_named_by_mirror_and_place() -> None:
    volumes = [one["csi"] for one in pod(described())["volumes"] if "csi" in one]
    assert [one["volumeAttributes"] for one in volumes] == [
        {"mirror": "mir_1", "mountLocation": place} for place in ("/models/m", "/b10/archive")
    ]
    assert {(one["driver"], one["readOnly"]) for one in volumes} == {("csi.bdn.dev", True)}


@pytest.mark.parametrize(("registry", "key"), [("docker.io", "https://index.docker.io/v1/"), ("ghcr.io", "ghcr.io")])
def test_secret__is_a_login_as_the_kubelet_reads_it(registry: str, key: str) -> None:
    made: Any = secret_of(described(), LOGIN.model_copy(update={"registry": registry}), "uid")
    held = json.loads(base64.b64decode(made["data"][".dockerconfigjson"]))
    assert held == {"auths": {key: {"auth": base64.b64encode(b"user:hunter2").decode()}}}
    assert pod(described())["imagePullSecrets"] == [{"name": made["metadata"]["name"]}]
