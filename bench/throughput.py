"""How fast the mirror takes objects in, beside s5cmd."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench import nginx, peers
from bench.nginx import Origin
from bench.report import FEW_RUNS, Figure, Missing, Row, ratios, scaled, scaled_size
from tests.support.services import services


def measure() -> list[Row]:
    """Large files and small ones."""
    return [*_case("large", 4, scaled_size(2 * 1024**3)), *_case("small", scaled(20_000), 32 * 1024)]


def _case(name: str, count: int, size: int) -> list[Row]:
    title = f"{count} x {size // 1024} KiB"
    ours, synced, alone = [], [], []
    with tempfile.TemporaryDirectory() as folder, nginx.serving_s3({name: (count, size)}) as origin:
        for run in range(FEW_RUNS):
            root = Path(folder, str(run))
            root.mkdir()
            ours.append(count * size / 1e9 / _mirror(origin, name, root / "mirror", count * size))
            if not peers.S5CMD.missing():
                seconds = _s5cmd(origin, name, root / "s5cmd")
                synced.append(count * size / 1e9 / seconds[0])
                alone.append(count * size / 1e9 / seconds[1])
            if count < 1000:  # room for the next; what is many files stays to the end: see ``BENCHMARKS``
                shutil.rmtree(root)
                os.sync()
    mirror = Figure(f"{title}: mirror", "GB/s", ours)
    if not synced:
        return [mirror, Missing(f"{title}: s5cmd", peers.S5CMD.missing(), ">= 2.0")]
    return [
        mirror,
        Figure(f"{title}: s5cmd and sync", "GB/s", synced),
        Figure(f"{title}: s5cmd", "GB/s", alone),
        Figure(f"{title}: ratio, pair by pair", "x", ratios(ours, synced), ">= 2.0"),
        Figure(f"{title}: ratio to s5cmd without sync", "x", ratios(ours, alone)),
    ]


def _mirror(origin: Origin, name: str, root: Path, size: int) -> float:
    with services.mirror(root, AWS_ENDPOINT_URL_S3=origin.url) as mirror:
        began = time.perf_counter()
        ready = mirror.ready(f"s3://{nginx.BUCKET}/{name}/")
        seconds = time.perf_counter() - began
    assert ready["bytes_transferred"] == size, ready
    return seconds


def _s5cmd(origin: Origin, name: str, target: Path) -> tuple[float, float]:
    """Seconds with the sync and without it."""
    target.mkdir()
    began = time.perf_counter()
    peers.S5CMD.run(origin, name, target)
    alone = time.perf_counter() - began
    subprocess.run(["sync", "-f", target], check=True)
    synced = time.perf_counter() - began
    peers.check(origin.folder(name), target, content=False)
    return synced, alone
