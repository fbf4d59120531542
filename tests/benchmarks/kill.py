"""What a killed agent fetches again."""

import subprocess
from pathlib import Path

from tests.benchmarks.mirrored import Mirrored, mirrored
from tests.benchmarks.report import RUNS, Figure, Row, scaled_size

SIZE, BATCH = 2 * 1024**3, 128 * 1024**2


def measure() -> list[Row]:
    """A fresh agent each time, alone in its cluster."""
    again: list[float] = []
    killed_at: list[float] = []
    with mirrored(1, scaled_size(SIZE)) as content:
        for run in range(RUNS):
            before = content.mirror.served_bytes
            killed_at.append(100 * _kill_half_way(content, f"agent-{run}") / content.size)
            _go_on(content, f"agent-{run}")
            again.append((content.mirror.served_bytes - before - content.size) / 1e6)
    title = f"{content.size // 1024**2} MiB"
    return [
        Figure(f"{title}: killed at", "%", killed_at),
        Figure(f"{title}: fetched again", "MB", again, f"<= {(content.size / 100 + BATCH) / 1e6:.0f}"),
    ]


def _kill_half_way(content: Mirrored, name: str) -> int:
    """Bytes that it said it had."""
    with content.agent(name) as agent:
        content.keep_in_memory()
        stage_id = agent.begin(content.grant, "job")
        done = 0
        while done < content.size // 2:
            stage = agent.http.get(f"/stages/{stage_id}").raise_for_status().json()
            assert stage["state"] in {"PENDING", "STAGING"}, stage
            done = int(stage["mounts"][0]["bytes_done"])
        agent.process.kill()
        agent.process.wait()
    return done


def _go_on(content: Mirrored, name: str) -> None:
    (source,) = content.source.iterdir()
    with content.agent(name) as agent:
        (found,) = agent.http.get("/stages").raise_for_status().json()["items"]
        stage = agent.finished(found["id"])
        subprocess.run(["cmp", source, Path(stage["mounts"][0]["path"]) / source.name], check=True)
        agent.unstage(stage)
