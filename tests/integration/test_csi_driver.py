"""The CSI driver between a kubelet and real services: what pods read, and what becomes of a volume that waits, fails or goes."""

# ruff: noqa: ASYNC110 - other processes: there is nothing to be notified by

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import StatusCode

from bdn.disk.binding import unbind
from bdn.wire.mirror_schema import MirrorRequestBody
from bdn.wire.stage_schema import StageRequest
from node_agent.csi.protocol import csi_pb2
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.csi_node import CsiNode, node_folder
from tests.support.agent.kubelet import OK, Pod
from tests.support.agent.mounts import needs_mounts
from tests.support.agent.process import Daemon
from tests.support.content.trees import tree
from tests.support.mirror.process import ServingProcess
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.waiting import LONGEST_SECONDS

pytestmark = needs_mounts
MODEL = {"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 40_000, "empty.txt": b""}
SOURCE = {"source": "hf://org/model@main"}
MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/base/agent.yaml"
SHORT_SECONDS = 4.0  # a deadline that a call is held for half of


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as double:
        double.repo("org/model").commit(MODEL)
        double.repo("org/gated", gated=True).commit(MODEL)
        yield double


@asynccontextmanager
async def node_of(hub: Hub, folder: Path, **environ: str) -> AsyncIterator[CsiNode]:
    given = {"HF_ENDPOINT": hub.url, "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK}
    with node_folder() as root:
        async with await ServingProcess.start(folder / "mirror", **given, **environ) as mirror:
            yield CsiNode(root, mirror.url)


@pytest.fixture
async def node(hub: Hub, tmp_path: Path) -> AsyncIterator[CsiNode]:
    async with node_of(hub, tmp_path) as node:
        yield node


@pytest.fixture
async def agent(node: CsiNode) -> AsyncIterator[Daemon]:
    async with node.agent.daemon() as daemon:
        yield daemon


async def mirrored(node: CsiNode, *sources: Mapping[str, Any]) -> str:
    """The id of a mirror that is READY."""
    async with node.mirror() as client:
        weights = [{"mount_location": f"/{number}", **one} for number, one in enumerate(sources)]
        mirror = await client.request(MirrorRequestBody.model_validate({"weights": weights}))
        while mirror.status != "READY":
            mirror = await client.mirror(mirror.id, 60)
            assert mirror.status in ("PENDING", "SYNCING", "READY"), mirror
    return mirror.id


async def waits(pod: Pod, figures: str) -> str:
    """Publish with short deadlines until the answer has these figures."""
    answers = []
    for _ in range(30):
        answers.append(await pod.publish(SOURCE, SHORT_SECONDS))
        assert answers[-1].status is StatusCode.ABORTED
        if figures in answers[-1].text:
            return answers[-1].text
    pytest.fail(f"no answer has {figures!r}: {answers}")


async def test_volume__shows_the_sources_tree_read_only__also_without_agent_and_driver(
    node: CsiNode, agent: Daemon
) -> None:
    pod = node.pod()
    async with node.driver() as driver:
        assert await pod.publish(SOURCE) == OK, node.log
        assert tree(pod.target) == MODEL
        driver.kill()
        await driver.wait()
    await agent.kill()

    assert tree(pod.target) == MODEL
    for path in ("config.json", "new"):
        with pytest.raises(OSError, match="Read-only file system"):
            (pod.target / path).write_bytes(b"mine")
    with pytest.raises(OSError, match="Read-only file system"):
        (pod.target / "config.json").unlink()


async def test_driver__is_found_by_the_kubelet__and_says_what_it_is(node: CsiNode) -> None:
    async with node.driver():
        info = await node.kubelet.register()
        plugin = await node.kubelet.ask(
            "Identity/GetPluginInfo", csi_pb2.GetPluginInfoRequest(), csi_pb2.GetPluginInfoResponse
        )
        this = await node.kubelet.ask("Node/NodeGetInfo", csi_pb2.NodeGetInfoRequest(), csi_pb2.NodeGetInfoResponse)
        for call, request in (
            ("Identity/Probe", csi_pb2.ProbeRequest()),
            ("Identity/GetPluginCapabilities", csi_pb2.GetPluginCapabilitiesRequest()),
            ("Node/NodeGetCapabilities", csi_pb2.NodeGetCapabilitiesRequest()),
        ):
            answer = await node.kubelet.ask(call, request, csi_pb2.ProbeResponse)
            assert answer.SerializeToString() == b""
        sockets = [path for path in node.kubelet.root.rglob("*") if path.is_socket()]
        modes = {path.stat().st_mode & 0o777 for path in sockets}

    assert (info.type, info.name, list(info.supported_versions)) == ("CSIPlugin", "csi.bdn.dev", ["1.0.0"])
    assert (plugin.name, this.node_id) == ("csi.bdn.dev", "node-1")
    assert Path(info.endpoint) in sockets
    assert [oct(mode) for mode in modes if mode & 0o077] == []


async def test_liveness_probe__of_the_manifests__succeeds_while_the_driver_answers_and_fails_without_it(
    node: CsiNode,
) -> None:
    daemon_set = next(yaml.safe_load_all(MANIFEST.read_text()))
    (driver,) = [one for one in daemon_set["spec"]["template"]["spec"]["containers"] if one["name"] == "csi"]
    python, *arguments = driver["livenessProbe"]["exec"]["command"]
    assert python == "python"
    command = [sys.executable, *(one.replace("/var/lib/kubelet", str(node.kubelet.root)) for one in arguments)]

    async def probed() -> int:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        return await process.wait()

    async with node.driver():
        assert await probed() == 0
    assert await probed() == 1


async def test_volume__published_again__is_the_same_mount_and_stage(node: CsiNode, agent: Daemon, hub: Hub) -> None:
    pod = node.pod()
    async with node.driver():
        assert await pod.publish(SOURCE) == OK
        before, requests = pod.target.stat(), len(hub.log.find())
        assert await pod.publish(SOURCE) == OK
    async with node.driver():
        assert await pod.publish(SOURCE) == OK
        assert (pod.target.stat().st_ino, len(hub.log.find())) == (before.st_ino, requests)
        assert len(await node.open_stages(agent)) == 1
        assert mounts_at(pod) == 1

        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)
        assert await pod.unpublish() == OK


async def test_volume__of_a_running_pod__stays_when_a_repeated_publish_would_be_refused(
    node: CsiNode, agent: Daemon
) -> None:
    """A kubelet that restarts publishes again, to a driver or with a CSIDriver that may have other rules by then."""
    pod = node.pod()
    async with node.driver():
        assert await pod.publish(SOURCE) == OK
    async with node.driver(BDN_AUTH="token"):
        for attributes in (SOURCE, {**SOURCE, "of_an_earlier_version": ""}, {"source": "nonsense"}):
            assert await pod.publish(attributes) == OK
            assert tree(pod.target) == MODEL
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)


async def test_unpublish__of_a_volume_that_never_was__succeeds(node: CsiNode, agent: Daemon) -> None:
    async with node.driver():
        assert await node.pod().unpublish() == OK
        assert await node.pod().made().unpublish() == OK


def as_folder(pod: Pod) -> None:
    pod.target.mkdir()


def as_file(pod: Pod) -> None:
    pod.target.write_bytes(b"")


def as_link(pod: Pod) -> None:
    pod.target.symlink_to("/etc")


def as_mounts(pod: Pod) -> None:
    """Two of them, one above the other, and writable."""
    pod.target.mkdir()
    for _ in range(2):
        subprocess.run(["mount", "--bind", "/etc", pod.target], check=True)


@pytest.mark.parametrize("wrong", [as_folder, as_file, as_link, as_mounts])
async def test_target__half_made_or_wrong__is_taken_away_first(
    node: CsiNode, agent: Daemon, wrong: Callable[[Pod], None]
) -> None:
    before = tree(Path("/etc/apt"))
    pod, other = node.pod().made(), node.pod("pod-1").made()
    wrong(pod)
    wrong(other)
    async with node.driver():
        assert await pod.publish(SOURCE) == OK, node.log
        assert tree(pod.target) == MODEL
        assert mounts_at(pod) == 1
        assert await other.unpublish() == OK
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod, other)
    assert tree(Path("/etc/apt")) == before


async def test_target__with_files_in_it__is_refused_and_the_files_stay(node: CsiNode, agent: Daemon) -> None:
    pod = node.pod().made()
    pod.target.mkdir()
    (pod.target / "mine").write_bytes(b"mine")
    async with node.driver():
        for answer in (await pod.publish(SOURCE), await pod.unpublish()):
            assert answer.status is not None
            assert "MOUNT_FAILED" in answer.text
            assert "look at what is in it" in answer.text
    assert (pod.target / "mine").read_bytes() == b"mine"


async def test_volume__whose_mirror_takes_longer_than_the_call__is_aborted_with_figures_and_joined_by_the_next(
    node: CsiNode, agent: Daemon, hub: Hub
) -> None:
    pod = node.pod()
    hub.fail(stall(1_000_000), "model.safetensors", origin="cdn", times=None)
    async with node.driver():
        text = await waits(pod, " of 10.2 MB copied to the mirror")
        assert text.startswith("hf://org/model@main: ")
        assert len(text) <= 200
        assert list(pod.target.iterdir()) == [], (
            "without it the kubelet removes the folder of a deleted pod, and cannot unpublish"
        )

        hub.release_stalled()
        assert await pod.publish(SOURCE) == OK
        assert tree(pod.target) == MODEL
    ranges = [request.headers.get("range") for request in hub.log.find("model.safetensors", method="GET", origin="cdn")]
    assert len(ranges) == len(set(ranges)), "no byte was fetched twice"


async def test_volume__that_is_staged_longer_than_the_call__is_aborted_and_unpublish_ends_stage_and_fill(
    node: CsiNode, hub: Hub
) -> None:
    await mirrored(node, SOURCE)
    pod = node.pod()
    async with node.agent.daemon(BDN_AGENT_DOWNLOAD_RATE="20KB") as agent, node.driver():
        await waits(pod, " of 10.2 MB on this node")
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)

        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pod.publish(SOURCE))
            async with asyncio.timeout(LONGEST_SECONDS):
                while not (await node.open_stages(agent)):
                    await asyncio.sleep(0.02)
            assert await pod.unpublish() == OK
        assert waiting.result().status is StatusCode.ABORTED
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)


async def test_driver__stopped_while_a_call_waits__answers_with_figures_and_leaves_mounts(
    node: CsiNode, agent: Daemon, hub: Hub
) -> None:
    pod, other = node.pod(), node.pod("pod-1")
    async with node.driver() as driver:
        assert await pod.publish(SOURCE) == OK
        hub.repo("org/slow").commit({"slow.safetensors": bytes(range(255, -1, -1)) * 40_000})
        hub.fail(stall(1_000_000), "slow.safetensors", origin="cdn", times=None)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(other.publish({"source": "hf://org/slow"}))
            await asyncio.to_thread(hub.log.wait_for, "slow.safetensors")
            driver.send_signal(signal.SIGTERM)
        assert waiting.result().status is StatusCode.ABORTED
        assert await driver.wait() == 0
    assert tree(pod.target) == MODEL
    assert not node.kubelet.registration.exists()


REFUSED: list[tuple[dict[str, str], dict[str, Any], StatusCode, str, str]] = [
    ({"source": "hf://org/model", "revision": "x"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "'revision'"),
    ({}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "source and mirror"),
    ({**SOURCE, "mirror": "mir_0"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "source and mirror"),
    ({"mirror": "../tokens"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "not the id of a mirror"),
    ({"mirror": f"mir_{'0' * 24}"}, {}, StatusCode.NOT_FOUND, "NOT_FOUND", "mir_"),
    ({**SOURCE, "mountLocation": "/0"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "mountLocation"),
    ({"source": "model"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_SOURCE", "model"),
    ({"source": "hf://org/none"}, {}, StatusCode.PERMISSION_DENIED, "AUTH_REQUIRED", "org/none"),
    ({"source": "hf://org/model@none"}, {}, StatusCode.NOT_FOUND, "REVISION_NOT_FOUND", "none"),
    ({"source": "hf://org/gated"}, {}, StatusCode.PERMISSION_DENIED, "AUTH_REQUIRED", "org/gated"),
    ({**SOURCE, "secretName": "none"}, {}, StatusCode.NOT_FOUND, "SECRET_NOT_FOUND", "bdn-admin secrets set none"),
    ({**SOURCE, "allowPatterns": "*.bin"}, {}, StatusCode.INVALID_ARGUMENT, "NO_FILES_MATCHED", "*.bin"),
    ({**SOURCE, "allowPatterns": '["*.bin"'}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "JSON list"),
    ({**SOURCE, "hubCache": "yes"}, {}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "hubCache"),
    (SOURCE, {"readonly": False}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "readOnly: true"),
    (SOURCE, {"secrets": {"token": "hf_x"}}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "bdn-admin secrets set"),
    (SOURCE, {"volume_capability": csi_pb2.VolumeCapability(block=csi_pb2.VolumeCapability.BlockVolume())}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "Filesystem"),
    (SOURCE, {"volume_capability": csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume(mount_flags=["rw"]))}, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "mountOptions"),
    (SOURCE, {"volume_context": SOURCE}, StatusCode.FAILED_PRECONDITION, "NOT_SUPPORTED", "podInfoOnMount"),
]  # fmt: skip


async def test_volume__that_cannot_be__is_refused_with_code_and_remedy__and_leaves_nothing(
    node: CsiNode, agent: Daemon
) -> None:
    async with node.driver():
        for attributes, given, status, code, text in REFUSED:
            pod = node.pod().made()
            answer = await pod.publish(attributes, **given)
            assert (answer.status, answer.text.partition(": ")[0]) == (status, code), answer
            assert text in answer.text
            await node.assert_nothing_is_left(agent, pod)
    assert "hf_x" not in node.log


async def test_volume__refused_after_calls_that_waited__takes_its_stage_and_target_back(
    node: CsiNode, hub: Hub
) -> None:
    """The kubelet unpublishes nothing after a final refusal."""
    await mirrored(node, SOURCE)
    pod = node.pod()
    async with node.agent.daemon(BDN_AGENT_DOWNLOAD_RATE="20KB") as agent, node.driver():
        await waits(pod, "on this node")
        assert (await pod.publish({**SOURCE, "nonsense": ""})).status is StatusCode.INVALID_ARGUMENT
        await node.assert_nothing_is_left(agent, pod)


async def test_mirror__named_by_its_id__shows_its_source_or_the_one_of_a_mount_location(
    node: CsiNode, agent: Daemon
) -> None:
    one = await mirrored(node, {**SOURCE, "allow_patterns": ["*.json"]})
    two = await mirrored(node, SOURCE, {"source": "hf://org/model", "allow_patterns": ["*.txt"]})
    async with node.driver():
        pods = [node.pod(f"pod-{number}") for number in range(3)]
        assert await pods[0].publish({"mirror": one}) == OK
        assert await pods[1].publish({"mirror": two, "mountLocation": "/1"}) == OK, node.log
        assert await pods[2].publish({"mirror": two, "mountLocation": "/0/"}) == OK
        shown = [tree(pod.target) for pod in pods]
        undecided = await node.pod("pod-3").publish({"mirror": two})
        absent = await node.pod("pod-4").publish({"mirror": two, "mountLocation": "/2"})
        stages = {len(stage.mounts) for stage in await node.open_stages(agent)}
    assert shown == [{"config.json": b"{}"}, {"empty.txt": b""}, MODEL]
    assert stages == {1}
    assert undecided.status is StatusCode.INVALID_ARGUMENT
    assert "mountLocation" in undecided.text
    assert absent.status is StatusCode.NOT_FOUND
    assert f"/2 in mirror {two}" in absent.text


async def test_patterns_and_access_mode__of_a_persistent_volume__are_honoured(node: CsiNode, agent: Daemon) -> None:
    mode = csi_pb2.VolumeCapability.AccessMode(mode=csi_pb2.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY)
    attributes = {**SOURCE, "allowPatterns": '["*.json", "*.txt"]', "ignorePatterns": "empty*"}
    pod = node.pod(volume="llama-pv")
    async with node.driver():
        capability = csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume(), access_mode=mode)
        assert await pod.publish(attributes, readonly=False, volume_capability=capability) == OK, node.log
        assert tree(pod.target) == {"config.json": b"{}"}


# What runc since 1.2 does with a mount that the kubelet does not call read-only, and what root in the container then tries.
IN_A_CONTAINER = (
    'mount --bind "$1" "$1" && mount -o remount,bind,rw "$1" && cat "$1/config.json" && echo wrong >"$1/config.json"'
)


async def test_persistent_volume__that_a_container_runtime_makes_writable__is_closed_to_root_in_the_container(
    node: CsiNode, agent: Daemon
) -> None:
    mode = csi_pb2.VolumeCapability.AccessMode(mode=csi_pb2.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY)
    capability = csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume(), access_mode=mode)
    pod = node.pod(volume="llama-pv")
    async with node.driver():
        assert await pod.publish(SOURCE, readonly=False, volume_capability=capability) == OK, node.log
        command = ["unshare", "--mount", "sh", "-c", IN_A_CONTAINER, "sh", str(pod.target)]
        root = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert (root.stdout, root.returncode) == ("{}", 2), root
        assert "Permission denied" in root.stderr
        assert tree(pod.target) == MODEL
        assert await pod.publish(SOURCE, readonly=False, volume_capability=capability) == OK
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)


async def test_hub_cache__is_the_folder_of_the_repository(node: CsiNode, agent: Daemon) -> None:
    pod = node.pod()
    async with node.driver():
        assert await pod.publish({**SOURCE, "hubCache": "true"}) == OK, node.log
        (snapshot,) = (pod.target / "snapshots").iterdir()
        assert {name: (snapshot / name).read_bytes() for name in MODEL} == MODEL
        assert (pod.target / "refs/main").read_text() == snapshot.name


async def test_branch__that_moves_between_two_calls__leaves_one_stage(node: CsiNode, hub: Hub) -> None:
    await mirrored(node, SOURCE)
    pod = node.pod()
    async with node.agent.daemon(BDN_AGENT_DOWNLOAD_RATE="60KB") as agent, node.driver():
        await waits(pod, "on this node")
        hub.repositories["model", "org/model"].commit({"config.json": b"new"})
        assert await pod.publish({**SOURCE, "allowPatterns": "config.json"}) == OK
        (stage,) = await node.open_stages(agent)
        assert tree(pod.target) == {"config.json": b"new"}
        assert stage.state == "READY"


@pytest.mark.parametrize(
    ("size", "code", "status"),
    [
        ("1MB", "CACHE_TOO_SMALL", StatusCode.FAILED_PRECONDITION),
        ("15MB", "CACHE_FULL", StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_cache__that_is_too_small_or_full__is_final_or_not(
    node: CsiNode, hub: Hub, size: str, code: str, status: StatusCode
) -> None:
    other = {"weights": bytes(range(255, -1, -1)) * 40_000}
    hub.repo("org/other").commit(other)
    pods = node.pod(), node.pod("pod-1")
    async with node.agent.daemon(BDN_AGENT_CACHE_BYTES=size, BDN_AGENT_CLUSTER_CACHE_BYTES="0") as agent, node.driver():
        first = await pods[0].publish(SOURCE)
        answer = first if code == "CACHE_TOO_SMALL" else await pods[1].publish({"source": "hf://org/other"})
        assert (answer.status, answer.text.partition(": ")[0]) == (status, code), answer
        if code == "CACHE_FULL":
            assert await pods[0].unpublish() == OK
            assert await pods[1].publish({"source": "hf://org/other"}) == OK
            assert tree(pods[1].target) == other
            assert await pods[1].unpublish() == OK
        await node.assert_nothing_is_left(agent, *pods)


async def test_silent_services__are_unavailable__and_the_same_call_goes_on_once_they_answer(node: CsiNode) -> None:
    pod = node.pod()
    async with node.driver():
        silent = await pod.publish(SOURCE, SHORT_SECONDS)
        assert silent.status is StatusCode.UNAVAILABLE
        assert "no agent answers" in silent.text
        assert (await pod.unpublish()).status is StatusCode.UNAVAILABLE
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pod.publish(SOURCE))
            async with node.agent.daemon():
                assert await waiting == OK
    async with node.agent.daemon() as agent, replace(node, url="http://127.0.0.1:1").driver():
        silent = await node.pod("pod-1").publish(SOURCE, SHORT_SECONDS)
        assert silent.status is StatusCode.UNAVAILABLE
        assert "no mirror answers" in silent.text
        assert await pod.unpublish() == OK
        await node.assert_nothing_is_left(agent, pod)


async def test_stages_of_pods_that_are_gone__are_released_at_the_start__and_no_other(
    node: CsiNode, agent: Daemon
) -> None:
    gone, here = node.pod("gone"), node.pod("here")
    async with node.driver():
        assert await gone.publish(SOURCE) == OK
        assert await here.publish(SOURCE) == OK
    async with node.mirror() as client:
        grant = (await client.mirror(await mirrored(node, SOURCE))).grant
    jobs = ("default/pod/volume", f"a/b/c@{gone.uid}")
    for job in jobs:
        await agent.client.stage(StageRequest(job_id=job, grant=str(grant), wait=True))
    unbind(gone.target)
    await asyncio.to_thread(shutil.rmtree, gone.folder)
    async with node.driver():
        async with asyncio.timeout(LONGEST_SECONDS):
            while len(open_stages := await node.open_stages(agent)) > 3:
                await asyncio.sleep(0.02)
    assert sorted(stage.job_id.partition("@")[0] for stage in open_stages) == [
        "a/b/c",
        "default/here/weights",
        "default/pod/volume",
    ]
    assert tree(here.target) == MODEL


async def test_fifty_volumes__at_once__are_published_and_unpublished(node: CsiNode, agent: Daemon, hub: Hub) -> None:
    pods = [node.pod(f"pod-{number}") for number in range(50)]
    async with node.driver():
        async with asyncio.TaskGroup() as group:
            published = [group.create_task(pod.publish(SOURCE)) for pod in pods]
        assert {task.result() for task in published} == {OK}, node.log
        assert [pod.name for pod in pods if tree(pod.target) != MODEL] == []
        async with asyncio.TaskGroup() as group:
            ended = [group.create_task(pod.unpublish()) for pod in pods]
        assert {task.result() for task in ended} == {OK}
        await node.assert_nothing_is_left(agent, *pods)


async def test_pods_token__is_what_the_mirror_judges(hub: Hub, tmp_path: Path) -> None:
    async with node_of(hub, tmp_path, BDN_AUTH="token", BDN_TOKEN="operator") as open_node:
        node = replace(open_node, token="operator", given={"BDN_AUTH": "token"})
        async with node.agent.daemon(BDN_AUTH="token", BDN_TOKEN="operator") as agent, node.driver():
            pod = node.pod()
            missing, wrong = await pod.publish(SOURCE), await pod.publish(SOURCE, token="wrong")
            assert (missing.status, missing.text[:13]) == (StatusCode.FAILED_PRECONDITION, "NOT_SUPPORTED")
            assert "tokenRequests" in missing.text
            assert (wrong.status, wrong.text[:15]) == (StatusCode.PERMISSION_DENIED, "UNAUTHENTICATED")
            await node.assert_nothing_is_left(agent, pod)
            token = await node.token_of("acme")
            in_secrets: dict[str, Any] = {
                "secrets": {"csi.storage.k8s.io/serviceAccount.tokens": json.dumps({"bdn": {"token": token}})}
            }
            assert await pod.publish(SOURCE, token=token) == OK
            assert await node.pod("pod-1").publish(SOURCE, **in_secrets) == OK
            assert tree(pod.target) == MODEL
        assert token not in node.log


def mounts_at(pod: Pod) -> int:
    return sum(line.split()[4] == str(pod.target) for line in Path("/proc/self/mountinfo").read_text().splitlines())
