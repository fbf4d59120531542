"""Runs the cluster for tests and benchmarks: what is needed for it, and its report."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.kubernetes.images import why_no_base
from tests.support.agent.mounts import may_mount
from tests.support.services.training import CLIENTS

ROOT: Final = Path(__file__).parents[2]
GIVEN: Final = os.environ.get("BDN_KUBERNETES_BIN")
_LONGEST_SECONDS: Final = 900.0
Report = dict[str, Any]


def why_no_cluster() -> str:
    """What is missing here for a cluster, or an empty text."""
    if not GIVEN:
        return "BDN_KUBERNETES_BIN names no folder with the programs of Kubernetes: tests/kubernetes/README.md"
    if not may_mount():
        return "nothing can be mounted here"
    if sys.base_prefix == "/usr":
        return "Python is the system's, and is not in the cluster's root"
    return why_no_base(_beside("base"))


def why_no_training() -> str:
    """What users of truss lack there, or an empty text."""
    if not GIVEN:
        return why_no_cluster()
    if not CLIENTS.exists():
        return "truss is not installed: make kubernetes installs it"
    return "" if (_beside("root") / "usr/bin/git").exists() else f"truss needs git in {_beside('root')}"


def run_cluster() -> Report:
    """What happened in the cluster. Blocking, for minutes."""
    binaries, base, folder = Path(GIVEN or "").absolute(), _beside("base"), Path(tempfile.mkdtemp(prefix="k8s-"))
    pythons = {Path(sys.base_prefix), Path(sys.executable).resolve().parents[1], Path(sys.prefix).resolve().parent}
    needed = map(str, sorted({folder, binaries, base, ROOT, *pythons}))
    rig = ["sh", str(ROOT / "tests/kubernetes/rig.sh"), str(_beside("root")), *needed, "--"]
    command = [sys.executable, "-m", "tests.kubernetes.program", str(folder), str(binaries), str(base)]
    given = {"PATH": os.environ["PATH"], "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
    before = _cgroups()
    try:
        ended = subprocess.run(
            [*rig, *command], cwd="/", env=given, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return dict(json.loads((folder / "report.json").read_text()))
    finally:
        shutil.rmtree(folder)
        for each in _cgroups() - before:
            with suppress(OSError):  # another container runtime of this machine uses it
                each.rmdir()


def _cgroups() -> set[Path]:
    """Of containers: namespaces do not end them."""
    return set(Path("/sys/fs/cgroup").glob("*/k8s.io/*"))


def _beside(name: str) -> Path:
    return Path(GIVEN or "").absolute().parent / name
