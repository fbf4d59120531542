"""How fast very many small files appear, cold and warm."""

import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.mirrored import PREFIX, Mirrored, mirrored
from bench.report import RUNS, Figure, Row, ratios, scaled
from tests.support.services import services

COUNT, SIZE = 20_000, 32 * 1024
MEMORY = "/dev/shm"


def measure() -> list[Row]:
    """Cold beside tar, then warm."""
    ours, theirs, warm = [], [], []
    count = scaled(COUNT)
    with mirrored(count, SIZE) as content, tempfile.NamedTemporaryFile(dir=MEMORY) as archive:
        with tarfile.open(archive.name, "w") as tar:
            tar.add(content.source, arcname=PREFIX)
        for run in range(RUNS):
            content.keep_in_memory()
            cold, again = _stages(content, f"agent-{run}")
            ours.append(count / cold)
            warm.append(count / again)
            theirs.append(count / _unpack(Path(archive.name), content.root / f"tar-{run}"))
    title = f"{count} x {SIZE // 1024} KiB"
    return [
        Figure(f"{title}: cold stage", "files/s", ours),
        Figure(f"{title}: tar -x and sync", "files/s", theirs),
        Figure(f"{title}: ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.5"),
        Figure(f"{title}: warm stage", "files/s", warm, ">= 30000"),
    ]


def _stages(content: Mirrored, node: str) -> tuple[float, float]:
    """Seconds of a cold stage and of a warm one, of an agent alone in its cluster."""
    with content.agent(node) as agent:
        cold = agent.stage(content.grant, "cold")
        assert cold["mounts"][0]["bytes_from"]["mirror"] == content.bytes_total, cold
        warm = agent.stage(content.grant, "warm")
        assert warm["mounts"][0]["bytes_from"]["node"] == content.bytes_total, warm
        _check(content, cold)
    return services.seconds_of(cold), services.seconds_of(warm)


def _check(content: Mirrored, stage: Any) -> None:
    subprocess.run(["diff", "-rq", content.source, stage["mounts"][0]["path"]], check=True)


def _unpack(archive: Path, target: Path) -> float:
    target.mkdir()
    began = time.perf_counter()
    subprocess.run(["tar", "-xf", archive, "-C", target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return time.perf_counter() - began
