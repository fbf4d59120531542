"""The disk itself: fio with direct I/O in blocks of a chunk."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BLOCK = "8M"  # of bdn.core.chunk
_COMMON = ("--direct=1", f"--bs={BLOCK}", "--ioengine=libaio", "--group_reporting", "--output-format=json")


def missing() -> str:
    """Why it cannot run; empty when it can."""
    return "" if shutil.which("fio") else "fio is not installed; `make bench` installs it with apt"


def write(folder: Path, files: int, size: int, in_flight: int) -> float:
    """GB/s into fresh files, one after the other in each, ``in_flight`` blocks at any time; fsync included."""
    options = (f"--directory={folder}", "--rw=write", f"--size={size}", f"--numjobs={files}", "--end_fsync=1")
    depth = f"--iodepth={max(1, in_flight // files)}"
    return _run("write", *options, depth, "--fallocate=none", "--unlink=1")


def read(paths: Sequence[Path], in_flight: int) -> float:
    """GB/s out of these files, each from its beginning to its end."""
    names = ":".join(str(path).replace(":", r"\:") for path in paths)
    return _run("read", f"--filename={names}", "--rw=read", f"--iodepth={in_flight}", "--file_service_type=sequential")


def _run(direction: str, *options: str) -> float:
    done = subprocess.run(["fio", "--name=bdn", *_COMMON, *options], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"]) / 1e9
