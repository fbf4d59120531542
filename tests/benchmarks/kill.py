"""What a killed agent fetches again."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks import page_cache, s3_origin
from tests.benchmarks.report import Figure, Row
from tests.benchmarks.scale import RUNS, scaled_size
from tests.support import services

INTRODUCTION = """
`bdn-node-agent` is killed with SIGKILL half-way through a file of 2 GiB and started again; the stage goes on by itself. The
figure is what the mirror's data plane has sent beyond the file's size. Allowed: 1 % of it, and the last batch that was not
synced yet (128 MiB). The staged file is compared with the source in the end.
"""
SIZE, PREFIX, BATCH = 2 * 1024**3, "model", 128 * 1024**2


def measure() -> list[Row]:
    """A fresh agent each time."""
    size = scaled_size(SIZE)
    again: list[float] = []
    killed_at: list[float] = []
    with (
        tempfile.TemporaryDirectory() as name,
        s3_origin.serving({PREFIX: (1, size)}) as origin,
        services.mirror(Path(name) / "mirror", AWS_ENDPOINT_URL_S3=origin.url) as mirror,
    ):
        grant = mirror.ready(f"s3://{s3_origin.BUCKET}/{PREFIX}/")["grant"]
        (source,) = origin.folder(PREFIX).iterdir()
        for run in range(RUNS):
            before = mirror.served_bytes
            root = Path(name) / f"agent-{run}"
            killed_at.append(100 * _kill_half_way(root, mirror, grant, size) / size)
            _go_on(root, mirror, source)
            again.append((mirror.served_bytes - before - size) / 1e6)
            shutil.rmtree(root)
    title = f"{size // 1024**2} MiB"
    return [
        Figure(f"{title}: killed at", "%", tuple(killed_at)),
        Figure(f"{title}: fetched again", "MB", tuple(again), f"<= {(size / 100 + BATCH) / 1e6:.0f}"),
    ]


def _kill_half_way(root: Path, mirror: services.Mirror, grant: str, size: int) -> int:
    """Bytes that it said it had."""
    with services.agent(root, mirror.url) as agent:
        page_cache.keep(page_cache.files_below(mirror.store))
        stage_id = agent.begin(grant, "job")
        done = 0
        while done < size // 2:
            stage = agent.http.get(f"/stages/{stage_id}").raise_for_status().json()
            assert stage["state"] in {"PENDING", "STAGING"}, stage
            done = int(stage["mounts"][0]["bytes_done"])
        agent.process.kill()
        agent.process.wait()
    return done


def _go_on(root: Path, mirror: services.Mirror, source: Path) -> None:
    with services.agent(root, mirror.url) as agent:
        (found,) = agent.http.get("/stages").raise_for_status().json()["items"]
        stage = agent.finished(found["id"])
        subprocess.run(["cmp", source, Path(stage["mounts"][0]["path"]) / source.name], check=True)
        agent.unstage(stage)
