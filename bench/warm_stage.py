"""How soon a job has what its node already holds."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.layout import Manifest
from bench.report import Figure, Row, scaled
from tests.support.agent.cache import hold_sparse
from tests.support.agent.mirror import AgentMirror
from tests.support.services import services
from tests.support.services.commands import wait_until

STAGES, FILES = 200, 1_000
LARGE_FILES, LARGE_SIZE = 30, 140 * 10**9


def measure() -> list[Row]:
    """Many files, and large ones."""
    count = scaled(FILES)
    many = _stages(lambda mirror, _: mirror.publish({f"d{n % 20}/{n}.json": b"%1024d" % n for n in range(count)}))
    large = _stages(_hold)
    return [*_figures(f"{count} files", many), *_figures(f"{LARGE_SIZE // 10**9} GB in {LARGE_FILES} files", large)]


def _figures(title: str, seconds: list[float]) -> list[Row]:
    in_order = sorted(seconds)
    worst = in_order[math.ceil(0.99 * len(in_order)) - 1]
    return [
        Figure(f"{title}: stage", "ms", tuple(1000 * each for each in seconds)),
        Figure(f"{title}: p99 of {len(seconds)}", "ms", (1000 * worst,), "< 100"),
    ]


def _hold(mirror: AgentMirror, cache: Path) -> Manifest:
    chunks = LARGE_SIZE // LARGE_FILES // CHUNK_SIZE
    sizes = {f"model-{n:05}.safetensors": (chunks + n) * CHUNK_SIZE for n in range(LARGE_FILES)}
    manifest = hold_sparse(cache, sizes)
    mirror.manifests[manifest.digest] = manifest
    return manifest


def _stages(prepare: Callable[[AgentMirror, Path], Manifest]) -> list[float]:
    with tempfile.TemporaryDirectory() as name, AgentMirror().running() as mirror:
        root = Path(name) / "agent"
        manifest = prepare(mirror, root / "data/cache")
        grant = mirror.grant(manifest)
        # Or the sparse files are evicted where this disk has not as much space as they seem to take.
        space = {"BDN_AGENT_CACHE_BYTES": "1TB", "BDN_AGENT_HEADROOM_BYTES": "0"}
        with services.starting_agent(root, mirror.url, **space) as agent:
            wait_until(lambda: services.answers(agent.http), what="the agent")
            agent.unstage(agent.stage(grant, "first"))
            return [_seconds(agent, grant, f"job-{n}", manifest.bytes_total) for n in range(max(50, scaled(STAGES)))]


def _seconds(agent: services.Agent, grant: str, job: str, size: int) -> float:
    stage = agent.stage(grant, job)
    assert stage["mounts"][0]["bytes_from"]["node"] == size, stage
    agent.unstage(stage)
    return services.seconds_of(stage)
