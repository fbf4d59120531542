"""What a warm page cache costs an agent, and what it gains a job."""

import time
from pathlib import Path
from typing import Any

from bench import disk
from bench.mirrored import mirrored
from bench.report import RUNS, Figure, Missing, Row, ratios, scaled_size
from tests.support.services import services

SIZE = 2 * 1024**3
LONGEST_SECONDS = 120


def measure() -> list[Row]:
    """Cold and warm, in turn; the agent has the file from the beginning."""
    cold, warm, seconds, cpu = [], [], [], []
    with mirrored(1, scaled_size(SIZE)) as content, content.agent("agent") as agent:
        agent.unstage(agent.stage(content.grant, "first"))
        disk.drop(disk.files_below(content.root))
        for run in range(RUNS):
            stage = agent.stage(content.grant, f"cold-{run}")
            cold.append(_read(stage, content.gigabytes))
            agent.unstage(stage)
            before = agent.cpu_seconds
            stage = _warmed(agent, content.grant, f"warm-{run}")
            cpu.append((agent.cpu_seconds - before) / content.gigabytes)
            if stage["warm"]["state"] != "WARM":
                return [Missing("warm", stage["warm"]["reason"])]
            seconds.append(stage["warm"]["seconds"])
            warm.append(_read(stage, content.gigabytes))
            agent.unstage(stage)
    return [
        Figure("cold: first read", "GB/s", cold),
        Figure("warm: first read", "GB/s", warm),
        Figure("warm to cold, pair by pair", "x", ratios(warm, cold)),
        Figure("from READY to WARM", "s", seconds),
        Figure("CPU of the agent meanwhile", "s/GB", cpu),
    ]


def _warmed(agent: services.Agent, grant: str, job: str) -> Any:
    stage = agent.stage(grant, job, warm=True)
    deadline = time.monotonic() + LONGEST_SECONDS
    while stage["warm"]["state"] == "WARMING":
        assert time.monotonic() < deadline, stage
        time.sleep(0.25)  # each question takes of the CPU that is measured
        stage = agent.finished(stage["id"])
    return stage


def _read(stage: Any, gigabytes: float) -> float:
    """GB/s; afterwards the page cache has nothing of it any more."""
    files = disk.files_below(Path(stage["mounts"][0]["path"]))
    began = time.perf_counter()
    disk.keep(files)
    seconds = time.perf_counter() - began
    disk.drop(files)
    return gigabytes / seconds
