"""The disk itself: fio with direct I/O in blocks of a chunk."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import disk

LONGEST_SECONDS = 300
BLOCK = "8M"  # of bdn.core.chunk
_COMMON = ("--direct=1", f"--bs={BLOCK}", "--ioengine=libaio", "--group_reporting", "--output-format=json")


def missing() -> str:
    """Why it cannot run; empty when it can."""
    return "" if shutil.which("fio") else "fio is not installed; `make bench` installs it with apt"


def write(root: Path, files: int, size: int, in_flight: int, within: Sequence[str] = ()) -> float:
    """GB/s into fresh files below ``root``, from the beginning to the end of each, ``in_flight`` blocks at any time; fsync included.

    ``within`` is a command that runs the command that follows it.
    """
    depth = max(1, in_flight // files)
    options = ("--rw=write", f"--size={size}", f"--numjobs={files}", f"--iodepth={depth}", "--end_fsync=1")
    disk.settle(root)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        return _run("write", f"--directory={folder}", *options, "--fallocate=none", "--unlink=1", within=within)


def read(folder: Path, in_flight: int) -> float:
    """GB/s out of all files below the folder, one after the other, each from its beginning to its end."""
    order = ("--rw=read", "--file_service_type=sequential")
    return _run("read", f"--opendir={folder}", *order, f"--iodepth={in_flight}")  # 256 names are too many for an option


def _run(direction: str, *options: str, within: Sequence[str] = ()) -> float:
    command = [*within, "fio", "--name=bdn", *_COMMON, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    assert done.returncode == 0, f"fio: {done.stderr[-1000:]}{done.stdout[-1000:]}"
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"]) / 1e9
