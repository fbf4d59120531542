"""What is started for a rank: argument vectors, without starting anything."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.settings import SettingsError
from node_agent.run.capacity import gpu_type_of
from node_agent.run.launchers import Bind, Container, answering_launcher, bwrap, docker, podman

PLAIN = Container(
    name="bdn-run0000001-0",
    binds=(
        Bind(Path("/runs/shared"), "/b10/run", is_writable=True),
        Bind(Path("/views/m0"), "/root/.cache/model"),
        Bind(Path("/jobs/tmp"), "/tmp", is_writable=True),
    ),
    home=Path("/jobs/home"),
    image="registry.example/image:1",
)
FULL = replace(
    PLAIN,
    cpus=8,
    memory_bytes=2**30,
    gpus=(0, 3),
    login=Path("/runs/login"),
    has_infiniband=True,
    working_dir=None,
    has_scopes=True,
)
BINDS = "--volume /runs/shared:/b10/run --volume /views/m0:/root/.cache/model:ro --volume /jobs/tmp:/tmp"
RUN = "--detach --name bdn-run0000001-0 --network host --user 0:0"
LIMITS = "--cpus 8 --memory 1073741824 --shm-size 536870912"
INFINIBAND = "--device /dev/infiniband --ulimit memlock=-1"
SCRIPT = "--entrypoint /b10/run/start.sh -- registry.example/image:1"
GPUS = "--device nvidia.com/gpu=0 --device nvidia.com/gpu=3"


@pytest.mark.parametrize(("vector", "expected"), [
    (podman(PLAIN), f"podman run {RUN} {BINDS} {SCRIPT} /b10/workspace"),
    (docker(PLAIN), f"docker run {RUN} {BINDS} {SCRIPT} /b10/workspace"),
    (podman(FULL), f"podman run --authfile /runs/login/config.json {RUN} {LIMITS} {GPUS} {INFINIBAND} {BINDS} {SCRIPT}"),
    (docker(FULL), f"docker --config /runs/login run {RUN} {LIMITS} --gpus '\"device=0,3\"' {INFINIBAND} {BINDS} {SCRIPT}"),
])  # fmt: skip
def test_engine__starts_script_as_root_with_the_binds_and_limits(vector: list[str], expected: str) -> None:
    assert vector == shlex.split(expected)


def test_sandbox__as_root__has_no_capabilities_and_outer_places_first() -> None:
    text = shlex.join(bwrap(PLAIN))

    assert text.startswith(
        "bwrap --info-fd 3 --unshare-pid --as-pid-1 --unshare-ipc --unshare-uts --new-session --cap-drop ALL"
    )
    assert "--unshare-user" not in text
    assert (
        "--bind /jobs/home /root --bind /jobs/tmp /tmp --bind /runs/shared /b10/run --ro-bind /views/m0 /root/.cache/model"
        in text
    )
    assert text.endswith("--chdir /root --remount-ro / /b10/run/start.sh /b10/workspace")
    assert "/etc/shadow" not in text


def test_sandbox__of_another_user__is_root_inside() -> None:
    text = shlex.join(bwrap(replace(FULL, is_root=False)))

    assert "--cap-drop ALL --unshare-user --uid 0 --gid 0" in text
    assert text.startswith("bwrap ")  # without a scope, which only root can make


def test_sandbox__with_systemd_and_gpus__is_limited_and_sees_its_devices_alone() -> None:
    text = shlex.join(bwrap(FULL))

    assert text.startswith(
        "systemd-run --scope --quiet --collect --unit=bdn-run0000001-0 --property=MemoryMax=1073741824 --property=CPUQuota=800% bwrap "
    )
    for device in ("nvidia0", "nvidia3", "nvidiactl", "infiniband"):
        assert f"--dev-bind-try /dev/{device} /dev/{device}" in text
    assert "nvidia1" not in text
    assert text.endswith("/b10/run/start.sh")


def test_launcher__none_installed__error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"bwrap: not installed.*Install podman, docker or bubblewrap"):
        answering_launcher(None)


def test_launcher__first_that_answers__is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, body in {"podman": "echo no such file >&2; exit 1", "docker": "exit 0", "bwrap": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert answering_launcher(None) == "docker"
    with pytest.raises(SettingsError, match=r"BDN_AGENT_JOB_LAUNCHER: .*podman: no such file"):
        answering_launcher("podman")


@pytest.mark.parametrize(("name", "kind"), [
    ("NVIDIA H200", "H200"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA A100-SXM4-40GB", "A100_40GB"),
    ("NVIDIA A10G", "A10G"),
    ("Tesla T4", "T4"),
    ("Tesla V100-SXM2-16GB", "V100"),
    ("NVIDIA GeForce RTX 4090", "4090"),
])  # fmt: skip
def test_gpu__named_by_the_driver__is_spelled_as_truss_does(name: str, kind: str) -> None:
    assert gpu_type_of(name) == kind
