"""What this node has for training jobs. All calls block."""

import os
import re
import shutil
import subprocess
from typing import Final

from bdn.wire.run_schema import LauncherName, NodeCapacity
from node_agent.settings import AgentSettings

_ANSWER_SECONDS: Final = 30
_BRANDS: Final = re.compile(r"^(NVIDIA|Tesla|GeForce|Quadro|RTX|\s)+")


def capacity_of(settings: AgentSettings, launcher: LauncherName) -> NodeCapacity:
    gpu_type, gpus = settings.gpu or found_gpus()
    return NodeCapacity(
        gpu_type=gpu_type if gpus else None,
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        slots=settings.job_slots,
        launcher=launcher,
    )


def found_gpus() -> tuple[str | None, int]:
    """The type and number of this node's NVIDIA GPUs. A node with several types counts the GPUs of the first."""
    if shutil.which("nvidia-smi") is None:
        return None, 0
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)  # noqa: S603 - constants
    except (OSError, subprocess.SubprocessError):
        return None, 0
    names = [gpu_type_of(name) for name in done.stdout.splitlines() if name.strip()]
    return (names[0], names.count(names[0])) if names else (None, 0)


def gpu_type_of(name: str) -> str:
    """As truss spells the name that NVIDIA's driver gives: ``H100``, ``A100_40GB``."""
    model = re.split(r"[\s-]", _BRANDS.sub("", name.strip()), maxsplit=1)[0].upper()
    return f"{model}_40GB" if model == "A100" and "40GB" in name else model
