"""Volumes of pods in a real cluster of one node: kubelet, containerd, hub, mirror, agent and driver, each a process of its own.

``BDN_KUBERNETES_BIN`` is a folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl of 1.20, and beside it ``root`` is a
Debian root with etcd-server, containerd, runc, containernetworking-plugins, iptables, conntrack, curl, openssl, busybox-static and iproute2.
``tests/kubernetes/README.md`` says how to make both.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kubernetes.cluster import JOURNEYS, MODEL, SLOW
from tests.support.agent.mounts import needs_mounts

ROOT: Final = Path(__file__).parents[2]
GIVEN: Final = os.environ.get("BDN_KUBERNETES_BIN")
Report = dict[str, Any]

pytestmark = [
    needs_mounts,
    pytest.mark.skipif(not GIVEN, reason="BDN_KUBERNETES_BIN names no folder with the programs of Kubernetes"),
    pytest.mark.skipif(sys.base_prefix == "/usr", reason="Python is the system's, and is not in the cluster's root"),
]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    """What happened in the cluster, which ran for all tests of this module."""
    binaries, folder = Path(GIVEN or "").absolute(), Path(tempfile.mkdtemp(prefix="k8s-"))
    needed = {
        folder,
        binaries,
        ROOT,
        Path(sys.base_prefix),
        Path(sys.executable).resolve().parents[1],
        Path(sys.prefix).resolve().parent,
    }
    command = [sys.executable, "-m", "tests.kubernetes.cluster", str(folder), str(binaries)]
    rig = [
        "sh",
        str(ROOT / "tests/kubernetes/rig.sh"),
        str(binaries.parent / "root"),
        *map(str, sorted(needed)),
        "--",
        *command,
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(rig, cwd="/", env=environment, capture_output=True, text=True, timeout=500, check=False)
    try:
        assert (folder / "report.json").exists(), ended.stdout + ended.stderr
        yield json.loads((folder / "report.json").read_text())
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def check(report: Report) -> None:
    assert [report[one.__name__]["error"] for one in JOURNEYS if "error" in report[one.__name__]] == [], report.get(
        "log"
    )


def sums_of(files: dict[str, bytes]) -> list[str]:
    """As ``sha256sum`` prints them."""
    return [f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in files.items()]


@pytest.mark.parametrize("volume", ["inline", "claim", "slow"])
def test_pod__reads_the_right_bytes__also_in_its_init_container__and_cannot_write(report: Report, volume: str) -> None:
    sums = sums_of(SLOW if volume == "slow" else MODEL)
    assert report[volume]["init"] == sums
    assert report[volume]["main"][:2] == sums
    assert report[volume]["main"][-1] == "write=1"


def test_refusals__are_events_of_the_pod_with_code_and_remedy(report: Report) -> None:
    assert "code = NotFound" in report["refused"]["revision"]
    assert "REVISION_NOT_FOUND" in report["refused"]["revision"]
    assert "code = InvalidArgument" in report["refused"]["secret"]
    assert "bdn-admin secrets set" in report["refused"]["secret"]
    assert "hf_x" not in report["log"]


def test_volume__that_takes_longer_than_a_call__has_figures_in_events__and_its_pod_runs_soon_after_the_last_byte(
    report: Report,
) -> None:
    assert " of 10.2 MB copied to the mirror" in report["slow"]["events"]
    assert report["slow"]["seconds"] < 30  # a back-off of two minutes otherwise


def test_pods__read_on_while_agent_and_driver_are_killed_and_replaced__and_leave_nothing(report: Report) -> None:
    assert report["rolled"]["after"]["main"][:2] == sums_of(MODEL)
    assert [name for name, log in report["rolled"]["logs"].items() if "read failed" in log] == []
    assert (report["rolled"]["stages"], report["rolled"]["mounts"]) == ([], [])
