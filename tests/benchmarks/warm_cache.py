"""What a warm page cache costs an agent, and what it gains a job."""

import time
from pathlib import Path
from typing import Any

from tests.benchmarks import page_cache
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size
from tests.support.services import services

INTRODUCTION = """
A job's first read of a file of 2 GiB of its stage, in one thread, in pieces of 8 MiB: *cold*, after direct writes, when the
page cache has nothing of it; and, in turn, *warm*, when the stage was asked for with `"warm": true` and says that it is WARM.
What that costs is printed beside: the seconds between READY and WARM at the default rate (`BDN_AGENT_WARM_RATE`, 1 GB/s), and
the CPU of the agent meanwhile. It takes as much of the page cache as the stage has bytes, and nothing when they do not fit.
"""
SIZE = 2 * 1024**3
LONGEST_SECONDS = 120


def measure() -> list[Row]:
    """Cold and warm, in turn; the agent has the file from the beginning."""
    cold, warm, seconds, cpu = [], [], [], []
    with mirrored(1, scaled_size(SIZE)) as content, content.agent("agent") as agent:
        agent.unstage(agent.stage(content.grant, "first"))
        page_cache.drop(page_cache.files_below(content.root))
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
        Figure("cold: first read", "GB/s", tuple(cold)),
        Figure("warm: first read", "GB/s", tuple(warm)),
        Figure("warm to cold, pair by pair", "x", ratios(warm, cold)),
        Figure("from READY to WARM", "s", tuple(seconds)),
        Figure("CPU of the agent meanwhile", "s/GB", tuple(cpu)),
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
    files = page_cache.files_below(Path(stage["mounts"][0]["path"]))
    began = time.perf_counter()
    page_cache.keep(files)
    seconds = time.perf_counter() - began
    page_cache.drop(files)
    return gigabytes / seconds
