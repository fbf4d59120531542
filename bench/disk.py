"""The disk below a folder: its rest, the page cache before it, and fio with direct I/O in blocks of a chunk."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

_QUIET_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 60.0
_FIO_SECONDS: Final = 300
_PIECE: Final = 8 * 1024**2
_COMMON: Final = ("--direct=1", "--bs=8M", "--ioengine=libaio", "--group_reporting", "--output-format=json")


def number_of(folder: Path) -> str:
    """``major:minor`` of the whole disk, also when the folder lies on a partition of it. Raises ``OSError`` without a disk."""
    device = folder.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    if (found / "partition").exists():
        found = found.parent
    return (found / "dev").read_text().strip()


def settle(folder: Path) -> None:
    """Wait until the disk is quiet. Who writes next shall not pay for the blocks that somebody else gave back before.

    A file system that is mounted with ``discard`` tells the disk of freed blocks behind everybody's back, for seconds, and
    what is written to blocks that it has not told of yet may be several times as fast.
    """
    os.sync()
    try:
        statistics = Path(f"/sys/dev/block/{number_of(folder)}/stat")
    except OSError:
        return  # a file system in memory
    end, before = time.monotonic() + _LONGEST_SECONDS, ""
    while (now := statistics.read_text()) != before:
        assert time.monotonic() < end, "somebody else is using the disk"
        before = now
        time.sleep(_QUIET_SECONDS)


def files_below(folder: Path) -> list[Path]:
    """All of them, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def keep(paths: Iterable[Path]) -> None:
    """Read everything, so that the next reader gets it from memory."""
    buffer = bytearray(_PIECE)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Let go of everything, so that the next reader gets it from the disk. Only clean pages can go: sync first."""
    os.sync()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def missing_fio() -> str:
    """Why it cannot run; empty when it can."""
    return "" if shutil.which("fio") else "fio is not installed; `make bench` installs it with apt"


def write(root: Path, files: int, size: int, in_flight: int, within: Sequence[str] = ()) -> float:
    """fio's GB/s into fresh files below ``root``, each from its beginning to its end, ``in_flight`` blocks at any time.

    fsync is included. ``within`` is a command that runs the command that follows it.
    """
    depth = max(1, in_flight // files)
    options = ("--rw=write", f"--size={size}", f"--numjobs={files}", f"--iodepth={depth}", "--end_fsync=1")
    settle(root)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        return _run("write", f"--directory={folder}", *options, "--fallocate=none", "--unlink=1", within=within)


def read(folder: Path, in_flight: int) -> float:
    """fio's GB/s out of all files below the folder, one after the other, each from its beginning to its end."""
    order = ("--rw=read", "--file_service_type=sequential")
    return _run("read", f"--opendir={folder}", *order, f"--iodepth={in_flight}")  # 256 names are too many for an option


def _run(direction: str, *options: str, within: Sequence[str] = ()) -> float:
    command = [*within, "fio", "--name=bdn", *_COMMON, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_SECONDS, check=False)
    assert done.returncode == 0, f"fio: {done.stderr[-1000:]}{done.stdout[-1000:]}"
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"]) / 1e9
