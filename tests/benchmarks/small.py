"""How fast very many small files appear, cold and warm."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from tests.benchmarks import page_cache, s3_origin
from tests.benchmarks.fill import PREFIX, prepared
from tests.benchmarks.report import Figure, Row, ratios
from tests.benchmarks.scale import RUNS, scaled
from tests.support import services

INTRODUCTION = """
20,000 files of 32 KiB, which the mirror keeps in slabs. *cold stage*: the agent has none of them; the clock is the agent's
own, from the request to READY, and everything is verified and synced. In turn with `tar -x` of the same files from memory
(`/dev/shm`) to the same disk, and `sync -f` of its folder. *warm stage*: the cache has all of them, so a stage is a view of
20,000 hard links.
"""
COUNT, SIZE = 20_000, 32 * 1024
MEMORY = "/dev/shm"


def measure() -> list[Row]:
    """Cold beside tar, then warm."""
    ours, theirs, warm = [], [], []
    count = scaled(COUNT)
    with prepared(SIZE, count) as (service, origin, others), tempfile.NamedTemporaryFile(dir=MEMORY) as archive:
        _pack(origin, Path(archive.name))
        for run in range(RUNS):
            page_cache.keep(page_cache.files_below(service.mirror.store))
            service.mirror.evict_agents()
            stage = service.agent.stage(service.grant, f"cold-{run}")
            assert stage["mounts"][0]["bytes_from"]["mirror"] == service.size, stage
            ours.append(count / services.seconds_of(stage))
            service.agent.unstage(stage)
            theirs.append(count / _unpack(Path(archive.name), others))
            again = service.agent.stage(service.grant, f"warm-{run}")
            assert again["mounts"][0]["bytes_from"]["node"] == service.size, again
            warm.append(count / services.seconds_of(again))
            service.agent.unstage(again)
    title = f"{count} x {SIZE // 1024} KiB"
    return [
        Figure(f"{title}: cold stage", "files/s", tuple(ours)),
        Figure(f"{title}: tar -x and sync", "files/s", tuple(theirs)),
        Figure(f"{title}: ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.5"),
        Figure(f"{title}: warm stage", "files/s", tuple(warm), ">= 30000"),
    ]


def _pack(origin: s3_origin.Origin, archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        tar.add(origin.folder(PREFIX), arcname=PREFIX)


def _unpack(archive: Path, target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    subprocess.run(["tar", "-xf", archive, "-C", target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    os.sync()
    return seconds
