"""How fast an agent fills its disk from the mirror, beside the plainest thing that could be done."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.benchmarks.report import Figure
from tests.doubles.hub import Hub
from tests.support.commands import Shell, wait_until

INTRODUCTION = """
Cold stage of 4 files of 256 MiB through `bdn up` (mirror and agent in one process, chunks over loopback, every chunk
verified, files synced), in turn with `dd conv=fsync` of the same bytes on the same disk, both from the page cache. The
speed target and direct I/O belong to a later version; this is where it starts from.
"""
FILES, SIZE, RUNS = 4, 256 * 1024**2, 5


def measure() -> list[Figure]:
    """Pairs in turn."""
    ours, theirs = [], []
    with Hub() as hub, tempfile.TemporaryDirectory() as folder:
        block = os.urandom(SIZE)
        contents = {f"shard-{n}.safetensors": bytes([n]) + block[1:] for n in range(FILES)}
        hub.repo("org/model").commit(contents)
        plain = Path(folder) / "plain"
        plain.mkdir()
        for name, content in contents.items():
            (plain / name).write_bytes(content)
        del contents
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
        with shell.running("bdn", "up"):
            _wait(shell)
            mirror = shell.run("bdn", "mirror", "hf://org/model", "--wait", "--json").document
            for number in range(RUNS):
                ours.append(_stage(shell, mirror["id"], f"job-{number}"))
                theirs.append(_dd(plain, Path(folder) / "copy"))
    ratios = tuple(their / our for our, their in zip(ours, theirs, strict=True))
    total = FILES * SIZE / 1e9
    return [
        Figure("cold stage", "GB/s", tuple(total / seconds for seconds in ours)),
        Figure("dd conv=fsync", "GB/s", tuple(total / seconds for seconds in theirs)),
        Figure("ratio, pair by pair", "x", ratios),
    ]


def _wait(shell: Shell) -> None:
    wait_until(lambda: shell.run("bdn-admin", "agents", "--json").code == 0, what="the mirror's answer")


def _stage(shell: Shell, mirror_id: str, job: str) -> float:
    stage = shell.run("bdn", "stage", mirror_id, "--job", job, "--json").document
    assert stage["state"] == "READY", stage
    assert stage["mounts"][0]["bytes_from"]["mirror"] == FILES * SIZE
    shell.run("bdn", "unstage", stage["id"])
    evicted = shell.run("bdn-admin", "evict", "--all", "--tier", "node")
    assert evicted.code == 0, evicted.out + evicted.err
    return _seconds(stage)


def _seconds(stage: dict[str, str]) -> float:
    return (datetime.fromisoformat(stage["ready_at"]) - datetime.fromisoformat(stage["created_at"])).total_seconds()


def _dd(source: Path, target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    for path in source.iterdir():
        subprocess.run(
            ["dd", f"if={path}", f"of={target / path.name}", "bs=8M", "conv=fsync", "status=none"], check=True
        )
    seconds = time.perf_counter() - began
    subprocess.run(["rm", "-r", target], check=True)
    return seconds
