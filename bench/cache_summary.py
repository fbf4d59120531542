"""What a summary of a training cache of very many files costs, what their deletion does, and what the directory itself is worth."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bdn.wire.grants import CacheGrant
from bench import disk
from bench.report import RUNS, Figure, Missing, Row, ratios, scaled, scaled_size
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume

FILES, IN_ONE_FOLDER = 1_000_000, 1000
_MIB, _GIB = 1024**2, 1024**3
_IN_FLIGHT = 8
_WALK = """
import json, sys, threading, time
from pathlib import Path
from node_agent.job import shared_caches
from node_agent.job.cache_walk import summarized
began, cpu = time.perf_counter(), time.process_time()
summary = summarized(Path(sys.argv[1]), threading.Event())
files, packed = shared_caches._packed(summary)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
told = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "memory": peak * 1024 / 1e6}
print(json.dumps(told | {"files": summary.files, "entries": len(files), "packed": len(packed)}))
"""


def measure() -> list[Figure]:
    """A cache with a million files."""
    with _cache() as (volume, cache):
        count = scaled(FILES)
        _fill(cache, count)
        return [*_summary(cache.parent, count), *_removal(volume, count)]


def measure_directory() -> list[Row]:
    """A cache is a directory of the file system, and so worth the same."""
    if reason := disk.missing_fio():
        return [Missing("fio", reason)]
    size = scaled_size(_GIB)
    written: tuple[list[float], list[float]] = ([], [])
    read: tuple[list[float], list[float]] = ([], [])
    with _cache() as (volume, cache):
        bare = volume.root / "bare"
        bare.mkdir()
        for run in range(4 * RUNS):  # the disk's own speed differs by half; each is the first in every other pair
            for number, folder in sorted(enumerate((cache, bare)), reverse=run % 2 == 1):
                disk.settle(volume.root)
                written[number].append(disk.write(folder, 1, size, _IN_FLIGHT))
                (folder / "file").write_bytes(os.urandom(_MIB) * (size // _MIB))
                disk.drop([folder / "file"])
                read[number].append(disk.read(folder, _IN_FLIGHT))
                (folder / "file").unlink()
    title = f"{size // _MIB} MiB"
    return [
        Figure(f"{title} written to the bare directory", "GB/s", written[1]),
        Figure(f"{title} written to a cache: ratio to it, pair by pair", "x", ratios(*written), ">= 0.98"),
        Figure(f"{title} read from the bare directory", "GB/s", read[1]),
        Figure(f"{title} read from a cache: ratio to it, pair by pair", "x", ratios(*read), ">= 0.98"),
    ]


@contextmanager
def _cache() -> Iterator[tuple[CacheVolume, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "volumes"
        with Trash(root / ".trash") as trash:
            volume = CacheVolume(root, trash)
            grant = CacheGrant("org", "p" * 10, "t" * 10, "c", volume.id(), 0.0)
            yield volume, Path(volume.open(grant, huggingface=False).project)


def _fill(cache: Path, count: int) -> None:
    for start in range(0, count, IN_ONE_FOLDER):
        below = cache / f"{start // 100_000}" / f"{start // IN_ONE_FOLDER:05}"
        below.mkdir(parents=True)
        for number in range(start, min(count, start + IN_ONE_FOLDER)):
            os.mknod(below / f"sample-{number:07}.bin", 0o644)


def _summary(cache: Path, count: int) -> Sequence[Figure]:
    """In a process of its own, whose memory is only this, and the interpreter with its modules."""
    done = subprocess.run([sys.executable, "-c", _WALK, str(cache)], check=True, capture_output=True)
    told = json.loads(done.stdout)
    assert told["files"] == count
    title = f"{count} files, {told['entries']} entries told"
    return [
        Figure(f"{title}: time", "s", (told["seconds"],), "<= 60"),
        Figure(f"{title}: memory", "MB", (told["memory"],), "<= 200"),
        Figure(f"{title}: CPU per file", "µs", (told["cpu"] / count * 1e6,)),
        Figure(f"{title}: what travels", "MB", (told["packed"] / 1e6,)),
    ]


def _removal(volume: CacheVolume, count: int) -> Sequence[Figure]:
    began = time.perf_counter()
    assert volume.remove_project("org", "p" * 10)
    gone = time.perf_counter() - began
    while any((volume.root / ".trash").iterdir()):
        time.sleep(0.05)
    return [
        Figure(f"{count} files: gone under their name", "ms", (gone * 1000,)),
        Figure(f"{count} files: deleted in the background", "s", (time.perf_counter() - began,)),
    ]
