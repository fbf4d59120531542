"""deploy/kubernetes: accepted by Kubernetes' schemas, and all that it names is compared with the code."""

import asyncio
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any, Final

import click
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from bdn.mirror.access.clusters import load_clusters
from bdn.mirror.db.database import database_url
from bdn.mirror.settings import MirrorSettings
from bdn.settings import ClientSettings
from node_agent.settings import load_settings
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.agent.site import serving_agent
from tests.support.services.commands import ROOT

DEPLOY: Final = ROOT / "deploy/kubernetes"
DOCKERFILE: Final = (ROOT / "deploy/Dockerfile").read_text()
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OVERLAYS: Final = ("minimal", "production")
VERSIONS: Final = ("1.30", "1.37")
EXAMPLES: Final = sorted(path.name for path in (DEPLOY / "examples").glob("*.yaml"))
UID: Final = 999
Json = dict[str, Any]

needs_kubectl = pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not installed: it renders the overlays")


def read(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@cache
def rendered(overlay: str) -> list[Json]:
    return kustomize(DEPLOY / "overlays" / overlay)


def kustomize(folder: Path) -> list[Json]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(documents: list[Json], kind: str, name: str = "") -> Json:
    (found,) = [each for each in documents if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    return found


def pods(documents: list[Json]) -> list[Json]:
    """The specifications of pods."""
    return [
        each["spec"]["template"]["spec"] for each in documents if each["kind"] in ("Deployment", "DaemonSet", "Job")
    ]


def containers(pod: Json) -> list[Json]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def environment(container: Json) -> dict[str, str]:
    """The variables; those of Secrets and fields with a value of their form."""
    forms = {"BDN_DATABASE_URL": "postgresql://bdn:x@db:5432/bdn"}
    return {each["name"]: each.get("value", forms.get(each["name"], "given")) for each in container.get("env", [])}


AGENT: Final = one(read(DEPLOY / "base/agent.yaml"), "DaemonSet")["spec"]["template"]["spec"]
AGENT_CONTAINERS: Final = {each["name"]: each for each in containers(AGENT)}


# --- schemas ---


@needs_kubectl
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay__is_accepted_by_the_schemas(overlay: str, version: str) -> None:
    documents = rendered(overlay)
    assert len(documents) >= 10
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = json.loads(json.dumps(one(documents, "DaemonSet")))
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example__is_accepted_by_the_schemas_and_names_attributes_of_the_driver(name: str, version: str) -> None:
    documents = read(DEPLOY / "examples" / name)
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    specs = [each["spec"] for each in documents if each["kind"] == "Pod"] or pods(documents)
    volumes = [volume["csi"] for spec in specs for volume in spec["volumes"] if "csi" in volume]
    assert volumes
    for volume in volumes:
        assert (volume["driver"], volume["readOnly"]) == (
            one(read(DEPLOY / "base/csi-driver.yaml"), "CSIDriver")["metadata"]["name"],
            True,
        )
        assert set(volume["volumeAttributes"]) <= {"source", "mirror", "allowPatterns", "ignorePatterns", "secretName"}
        for patterns in ("allowPatterns", "ignorePatterns"):
            assert isinstance(json.loads(volume["volumeAttributes"].get(patterns, "[]")), list)


@needs_kubectl
def test_minimal__needs_nothing_that_kubernetes_1_20_has_not() -> None:
    used = {(each["apiVersion"], each["kind"]) for each in rendered("minimal")}
    assert not {version for version, _ in used} & {"policy/v1", "autoscaling/v2", "batch/v1"}
    assert {version for version, _ in used} == {"v1", "apps/v1", "rbac.authorization.k8s.io/v1", "storage.k8s.io/v1"}


@needs_kubectl
def test_overlays__have_what_each_promises() -> None:
    minimal, production = rendered("minimal"), rendered("production")
    mirror = one(minimal, "Deployment", "mirror")["spec"]
    assert (mirror["replicas"], mirror["strategy"]) == (1, {"type": "Recreate"})  # one process has the database
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "mirror"}} in mirror["template"]["spec"]["volumes"]
    assert one(minimal, "PersistentVolumeClaim")["metadata"]["name"] == "mirror"
    assert not [each for each in minimal if each["kind"] in ("Secret", "PodDisruptionBudget", "NetworkPolicy")]

    assert one(production, "Deployment", "mirror")["spec"]["replicas"] == 2
    for name in ("mirror", "worker"):
        pod = one(production, "Deployment", name)["spec"]["template"]["spec"]
        (migrate,) = pod["initContainers"]
        assert "bdn migrate" in migrate["command"][-1]
        budget = one(production, "PodDisruptionBudget", name)["spec"]
        assert budget["selector"] == one(production, "Deployment", name)["spec"]["selector"]
    assert {each["metadata"]["name"] for each in production if each["kind"] == "NetworkPolicy"} == {
        "nothing-else",
        "mirror",
        "agent",
    }
    assert not [each for each in production if each["kind"] in ("Secret", "ServiceMonitor")]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images__are_of_one_version_wherever_they_stand(overlay: str) -> None:
    images = {each["image"] for pod in pods(rendered(overlay)) for each in containers(pod)}
    assert images == {f"bdn:{PROJECT['version']}"}


def with_component(overlay: str, component: str, folder: Path) -> list[Json]:
    parts = {"resources": f"overlays/{overlay}", "components": f"components/{component}"}
    lines = [f"{name}: [{os.path.relpath(DEPLOY / place, folder.resolve())}]\n" for name, place in parts.items()]
    (folder / "kustomization.yaml").write_text("".join(lines))
    return kustomize(folder.resolve())


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_training_jobs__added_to_an_overlay__give_the_mirror_one_namespace_and_its_clusters(
    overlay: str, tmp_path: Path
) -> None:
    documents = with_component(overlay, "training-jobs", tmp_path)
    for document in documents:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    file = tmp_path / "kubernetes.toml"
    file.write_text(one(documents, "ConfigMap", _config(documents, "bdn-clusters"))["data"]["kubernetes.toml"])
    ((name, cluster),) = load_clusters(file).items()
    (before,) = load_clusters(DEPLOY / "base/kubernetes.toml").items()
    assert (name, cluster.model_copy(update={"jobs": None, "namespaces": {}})) == before
    assert cluster.jobs is not None
    assert cluster.jobs.image == f"bdn:{PROJECT['version']}"
    assert cluster.jobs.url == environment(AGENT_CONTAINERS["agent"])["BDN_URL"]

    role, binding = one(documents, "Role"), one(documents, "RoleBinding")
    assert {each["metadata"]["namespace"] for each in (role, binding)} == set(cluster.job_namespaces) == {"training"}
    assert (binding["roleRef"]["name"], binding["subjects"]) == (
        role["metadata"]["name"],
        [{"kind": "ServiceAccount", "name": "bdn-mirror", "namespace": "bdn"}],
    )
    given = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert given == {
        "jobs": {"create", "get", "list", "delete"}, "services": {"create"}, "secrets": {"create"}, "pods": {"list", "patch"},
    }  # fmt: skip
    space = one(documents, "Namespace", "training")["metadata"]["labels"]
    assert space["bdn.dev/jobs"] == "true"  # as the network policy of the mirror has it
    for program in ("mirror", "worker") if overlay == "production" else ("mirror",):
        pod = one(documents, "Deployment", program)["spec"]["template"]["spec"]
        assert (pod["serviceAccountName"], pod.get("automountServiceAccountToken", True)) == ("bdn-mirror", True)
        assert environment(pod["containers"][0])["BDN_KUBERNETES"] == "/etc/bdn/kubernetes.toml"
        mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounted["clusters"] == "/etc/bdn"


@needs_kubectl
def test_service_monitor__added_to_an_overlay__scrapes_the_mirrors_api(tmp_path: Path) -> None:
    documents = with_component("production", "service-monitor", tmp_path)
    monitor, service = one(documents, "ServiceMonitor"), one(documents, "Service")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert [each["replacement"] for each in endpoint["relabelings"]] == ["bdn-mirror"]  # as the rules have it


@needs_kubectl
@pytest.mark.parametrize(("overlay", "names"), [("minimal", {"agent"}), ("production", {"agent", "worker"})])
def test_service_monitor__added_to_an_overlay__scrapes_the_ports_that_it_gives_agents_and_workers(
    tmp_path: Path, overlay: str, names: set[str]
) -> None:
    documents = with_component(overlay, "service-monitor", tmp_path)
    templates = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in documents
        if each["kind"] in ("Deployment", "DaemonSet")
    }
    assert names <= templates.keys()
    for name in names:
        monitor, template = one(documents, "PodMonitor", name)["spec"], templates[name]
        container = next(each for each in template["spec"]["containers"] if each["name"] == name)
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        port = next(each["containerPort"] for each in container["ports"] if each["name"] == endpoint["port"])
        variable = f"BDN_{name.upper()}_METRICS"
        assert environment(container)[variable] == f"0.0.0.0:{port}"
        assert variable in settings_of(container["command"][0])
        labels = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
        assert labels == ({"job": "bdn-agent", "instance": None} if name == "agent" else {"job": "bdn-mirror"})
    for each in documents:
        if each["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    policies = [
        each["spec"] for each in documents if each["kind"] == "NetworkPolicy" and not each["spec"]["podSelector"]
    ]
    assert [rule["ports"] for policy in policies for rule in policy["ingress"]] == [
        [{"port": "metrics"}] for _ in policies
    ]
    assert len(policies) == (overlay == "production")


# --- commands and settings ---


def settings_of(program: str) -> set[str]:
    """The variables that a program reads."""
    if program in ("bdn", "sh"):
        return {MirrorSettings.variable(name) for name in MirrorSettings.model_fields}
    if program == "bdn-node-agent":
        kind = type(load_settings())
        return {kind.variable(name) for name in kind.model_fields} | {"POD_IP"}
    settings = importlib.import_module("node_agent.csi.settings").CsiSettings
    return {settings.variable(name) for name in settings.model_fields}


def programs() -> list[tuple[str, str, Json]]:
    files = [DEPLOY / "base/mirror.yaml", DEPLOY / "base/agent.yaml", DEPLOY / "overlays/production/worker.yaml"]
    return [(path.stem, each["name"], each) for path in files for pod in pods(read(path)) for each in containers(pod)]


@pytest.mark.parametrize(
    ("file", "name", "container"), programs(), ids=[f"{file}-{name}" for file, name, _ in programs()]
)
def test_container__runs_a_script_of_the_image_with_settings_that_it_has(file: str, name: str, container: Json) -> None:
    program, *arguments = container["command"]
    assert container["image"] == "bdn"
    if program == "chown":
        assert arguments == [f"{UID}:{UID}", "/var/lib/bdn"]
        return
    if program == "bdn-csi" and importlib.util.find_spec("node_agent.csi") is None:
        pytest.skip("this checkout has no bdn-csi")
    module, _, attribute = PROJECT["scripts"][program].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    if isinstance(command, click.Group):
        _, command, arguments = command.resolve_command(click.Context(command), arguments)
    assert command is not None
    command.make_context(program, list(arguments))
    assert environment(container).keys() <= settings_of(program)


def test_user_of_the_containers__is_that_of_the_image() -> None:
    assert f"groupadd --system --gid {UID} bdn && useradd --system --uid {UID} --gid bdn" in DOCKERFILE
    for _, name, container in programs():
        own = container.get("securityContext", {}).get("runAsUser", UID)
        assert own == (0 if name in ("own-cache", "csi") else UID), name


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_mirrors_settings__are_accepted_and_agree_with_service_and_clusters(
    overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = rendered(overlay)
    pod = one(documents, "Deployment", "mirror")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = environment(container) | (
        one(documents, "ConfigMap", _config(documents, "bdn-store"))["data"] if overlay == "production" else {}
    )
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = MirrorSettings()
    assert (settings.auth, settings.host, bool(settings.token)) == ("token", "0.0.0.0", True)
    assert settings.is_embedded == (overlay == "minimal")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"api": settings.port, "chunks": settings.data_port}
    service = one(documents, "Service")
    assert {port["name"]: (port["port"], port["targetPort"]) for port in service["spec"]["ports"]} == {
        name: (number, name) for name, number in ports.items()
    }
    assert (
        service["spec"]["selector"].items()
        <= one(documents, "Deployment", "mirror")["spec"]["template"]["metadata"]["labels"].items()
    )
    if overlay == "production":
        assert database_url(settings.effective_database_url).host == "db"
        assert settings.grant_key_file is not None
        assert settings.effective_store.startswith("s3://")

    # Tokens: the file is valid, and what the agents and the driver ask for is what it accepts.
    file = tmp_path / "kubernetes.toml"
    file.write_text(
        one(documents, "ConfigMap", _config(documents, "bdn-clusters"))["data"][
            settings.kubernetes.name if settings.kubernetes else ""
        ]
    )
    ((cluster, trusted),) = load_clusters(file).items()
    account = one(documents, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    assert trusted.agents == f"{one(documents, 'Namespace')['metadata']['name']}/{account}"
    assert environment(AGENT_CONTAINERS["agent"])["BDN_AGENT_CLUSTER"] == cluster
    assert [each["audience"] for each in one(documents, "CSIDriver")["spec"]["tokenRequests"]] == [trusted.audience]
    (projected,) = next(each for each in AGENT["volumes"] if each["name"] == "token")["projected"]["sources"]
    assert projected["serviceAccountToken"]["audience"] == trusted.audience
    mounted = [each["mountPath"] for each in container["volumeMounts"]]
    assert str(settings.kubernetes.parent if settings.kubernetes else "") in mounted
    assert str(settings.data_dir) in mounted


def _config(documents: list[Json], name: str) -> str:
    """The name that kustomize made of it."""
    (found,) = [
        each["metadata"]["name"]
        for each in documents
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith(name)
    ]
    return str(found)


def test_right_at_the_api_server__is_to_read_the_issuers_keys_alone() -> None:
    documents = read(DEPLOY / "base/accounts.yaml")
    assert {each["kind"] for each in documents} == {"ServiceAccount", "ClusterRoleBinding"}
    binding = one(documents, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == "system:service-account-issuer-discovery"
    assert [each["name"] for each in binding["subjects"]] == ["bdn-mirror"]
    of_component = DEPLOY / "components/training-jobs"  # compared where it is added
    others = [path for path in DEPLOY.rglob("*.yaml") if path.name != "accounts.yaml" and path.parent != of_component]
    assert len(others) > 10
    assert not [path for path in others if "Role" in path.read_text()]


# --- the agent's pod ---


def test_agent__has_no_privilege_and_the_driver_has_no_port() -> None:
    agent, driver, owner = (AGENT_CONTAINERS[name] for name in ("agent", "csi", "own-cache"))
    assert agent["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert driver["securityContext"] == {"privileged": True, "runAsUser": 0, "readOnlyRootFilesystem": True}
    assert "ports" not in driver
    assert not any(AGENT.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    assert AGENT["automountServiceAccountToken"] is False
    mounts = {
        name: {each["name"]: each for each in AGENT_CONTAINERS[name]["volumeMounts"]} for name in ("agent", "csi")
    }
    assert mounts["csi"]["kubelet"]["mountPropagation"] == "Bidirectional"
    assert mounts["csi"]["cache"]["mountPropagation"] == "HostToContainer"
    assert mounts["csi"]["cache"]["mountPath"] == mounts["agent"]["cache"]["mountPath"]
    assert "kubelet" not in mounts["agent"]
    assert mounts["agent"].keys() & mounts["csi"].keys() == {"cache", "run"}, "root shares nothing else with the agent"
    assert "token" not in mounts["csi"]
    (kubelet,) = [each["hostPath"]["path"] for each in AGENT["volumes"] if each["name"] == "kubelet"]
    assert mounts["csi"]["kubelet"]["mountPath"] == kubelet == environment(driver)["BDN_CSI_KUBELET_DIR"]


def test_agents_settings__are_accepted_and_shared_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    given, drivers = environment(AGENT_CONTAINERS["agent"]), environment(AGENT_CONTAINERS["csi"])
    for name, value in given.items():
        monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.0.0.5"))
    settings = load_settings()
    assert (settings.auth, settings.exposure, settings.headroom_percent) == ("token", "none", 20)
    assert settings.advertised(settings.data_port) == "http://10.0.0.5:8471"
    assert [each["containerPort"] for each in AGENT_CONTAINERS["agent"]["ports"]] == [settings.data_port]
    shared = given.keys() & drivers.keys()
    assert shared >= {"BDN_URL", "BDN_AUTH", "BDN_DATA_DIR", "BDN_AGENT_CACHE_DIR", "BDN_AGENT_SOCKET"}
    assert {name: given[name] for name in shared} == {name: drivers[name] for name in shared}
    token = {each["name"]: each["mountPath"] for each in AGENT_CONTAINERS["agent"]["volumeMounts"]}["token"]
    assert settings.token_file == Path(token, "token")
    assert settings.url == f"http://mirror.bdn.svc:{MirrorSettings.model_fields['port'].default}"
    assert settings.url != ClientSettings.model_fields["url"].default


def test_agent__is_on_each_node_and_rolled_in_parts() -> None:
    spec = one(read(DEPLOY / "base/agent.yaml"), "DaemonSet")["spec"]
    assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "10%"
    assert (AGENT["priorityClassName"], AGENT["tolerations"]) == ("system-node-critical", [{"operator": "Exists"}])


def test_csi_driver__asks_for_what_the_driver_needs() -> None:
    driver = one(read(DEPLOY / "base/csi-driver.yaml"), "CSIDriver")
    assert driver["metadata"]["labels"] == {"security.kubernetes.io/csi-ephemeral-volume-profile": "restricted"}
    spec = driver["spec"]
    assert (spec["attachRequired"], spec["podInfoOnMount"], spec["fsGroupPolicy"]) == (False, True, "None")
    assert sorted(spec["volumeLifecycleModes"]) == ["Ephemeral", "Persistent"]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
async def test_agents_probe__succeeds_while_the_agent_answers_and_fails_without_it(probe: str, tmp_path: Path) -> None:
    """The command of the manifest itself, with the socket of an agent of this test."""
    command = AGENT_CONTAINERS["agent"][probe]["exec"]["command"]
    socket = environment(AGENT_CONTAINERS["agent"])["BDN_AGENT_SOCKET"]
    assert command[0] == "python"
    assert socket in command[-1]
    with AgentMirror().running() as mirror:
        async with serving_agent(Rig(mirror, tmp_path)):
            asked = [sys.executable, *command[1:-1], command[-1].replace(socket, str(tmp_path / "agent.sock"))]
            assert await _exit_code(asked) == 0
    assert await _exit_code(asked) != 0


async def _exit_code(command: list[str]) -> int:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return await process.wait()


@needs_kubectl
def test_network_policies__open_the_ports_that_listen_to_those_who_connect() -> None:
    documents = rendered("production")
    ports: dict[str, set[str]] = {}
    for each in documents:
        if each["kind"] in ("Deployment", "DaemonSet"):
            template = each["spec"]["template"]
            label = template["metadata"]["labels"]["app.kubernetes.io/name"]
            ports[label] = {port["name"] for one_ in template["spec"]["containers"] for port in one_.get("ports", [])}
    opened: dict[str, set[str]] = {}
    for policy in (each["spec"] for each in documents if each["kind"] == "NetworkPolicy"):
        label = policy["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name", "")
        opened[label] = {port["port"] for rule in policy.get("ingress", []) for port in rule["ports"]}
        for rule in policy.get("ingress", []):
            assert rule["from"]  # without it, anybody
    assert opened == {"": set(), **{label: names for label, names in ports.items() if names}}
