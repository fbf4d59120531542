"""How much memory a large file takes on its way."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from tests.benchmarks.report import Figure
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.commands import Shell, wait_until

INTRODUCTION = """
One generated file through the hub double, a mirror and an agent in processes of their own; the figures are `VmHWM` of
`/proc/PID/status`. Everything is verified, written and synced twice, in the store and in the cache, on one disk.
`BDN_BENCH_GB` changes the size (20). Allowed: 600 MB each, whatever the size.
"""


def measure() -> list[Figure]:
    """For the size asked for, and a tenth of it: what grows with the file shows."""
    large = int(os.environ.get("BDN_BENCH_GB", "20"))
    figures: list[Figure] = []
    for gigabytes in (max(1, large // 10), large):
        mirror, agent, seconds = _move(gigabytes * 1000**3)
        figures.append(Figure(f"mirror, {gigabytes} GB", "MB", (mirror,), "< 600"))
        figures.append(Figure(f"agent, {gigabytes} GB", "MB", (agent,), "< 600"))
        figures.append(Figure(f"agent's fill, {gigabytes} GB", "GB/s", (gigabytes / seconds,)))
    return figures


def _move(size: int) -> tuple[float, float, float]:
    with Hub() as hub, tempfile.TemporaryDirectory() as folder:
        hub.repo("org/large").commit({"model.safetensors": GeneratedContent(size)})
        shell = Shell(
            Path(folder),
            {
                "HF_ENDPOINT": hub.url,
                "BDN_PORT": "18460",
                "BDN_DATA_PORT": "18461",
                "BDN_URL": "http://127.0.0.1:18460",
                "BDN_AGENT_DATA_PORT": "0",
                "BDN_AGENT_EXPOSURE": "symlink",
            },
        )
        with shell.running("bdn", "serve") as mirror, shell.running("bdn-node-agent") as agent:
            wait_until(
                lambda: shell.run("bdn-admin", "agents", "--json").document.get("items"), what="the agent's heartbeat"
            )
            mirrored = _run(shell, "bdn", "mirror", "hf://org/large", "--wait")
            began = time.perf_counter()
            staged = _run(shell, "bdn", "stage", mirrored["id"], "--job", "bench")
            seconds = time.perf_counter() - began
            path = Path(staged["mounts"][0]["path"]) / "model.safetensors"
            assert path.stat().st_size == size
            peaks = _peak(mirror), _peak(agent)
        shutil.rmtree(shell.data)
    return (*peaks, seconds)


def _run(shell: Shell, *command: str) -> Any:
    done = shell.run(*command, "--json")
    assert done.code == 0, done.out + done.err
    return done.document


def _peak(process: Popen[str]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) / 1000
