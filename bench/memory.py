"""How much memory a large file takes on its way."""

import os
import tempfile
from pathlib import Path

from bench.report import Figure
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.services import services
from tests.support.services.processes import peak_megabytes


def measure() -> list[Figure]:
    """For the size asked for, and a tenth of it: what grows with the file shows."""
    large = int(os.environ.get("BDN_BENCH_GB", "10"))
    figures: list[Figure] = []
    for gigabytes in (max(1, large // 10), large):
        mirror, agent, seconds = _move(gigabytes * 1000**3)
        figures.append(Figure(f"mirror, {gigabytes} GB", "MB", (mirror,), "< 600"))
        figures.append(Figure(f"agent, {gigabytes} GB", "MB", (agent,), "< 600"))
        figures.append(Figure(f"agent's fill, {gigabytes} GB", "GB/s", (gigabytes / seconds,)))
    return figures


def _move(size: int) -> tuple[float, float, float]:
    with (
        Hub() as hub,
        tempfile.TemporaryDirectory() as folder,
        services.mirror(Path(folder) / "mirror", HF_ENDPOINT=hub.url) as mirror,
        services.agent(Path(folder) / "agent", mirror.url) as agent,
    ):
        hub.repo("org/large").commit({"model.safetensors": GeneratedContent(size)})
        stage = agent.stage(mirror.ready("hf://org/large")["grant"], "bench")
        assert stage["mounts"][0]["bytes_from"]["mirror"] == size, stage
        return peak_megabytes(mirror.process.pid), agent.peak_megabytes, services.seconds_of(stage)
