"""Under a mixed load nothing grows: descriptors, threads, memory, disk.

``BDN_SOAK_SECONDS`` says for how long; without it, ``make fault`` does a minute and ``make test`` leaves it out.
``BDN_SOAK_PAUSE_SECONDS`` has each worker rest after each round, for an hour beside other work.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Final

import httpx2
import pytest

from bdn.core.errors import BdnError
from bdn.wire.stage_schema import StageRequest
from tests.doubles.hub import Hub
from tests.support.agent.process import COMMAND, Daemon, Program
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import source, until
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.promises.tally import Tally, at_scale
from tests.support.services.forked import executed

pytest_plugins = ("tests.support.mirror.fixtures",)

MODELS: Final = 8
FILES: Final = [
    {"w.bin": noise(3 * MIB, number), **{f"s/{small}": noise(5_000, 100 * number + small) for small in range(10)}}
    for number in range(MODELS)
]
CACHE: Final = 14_000_000  # room for four of eight models: every stage of another one evicts
FULL_SECONDS: Final = 60
QUESTIONS: Final = 100  # at once: more than any process has threads for
WARM_ROUNDS: Final = 60 * MODELS  # until then stores, caches, pools and every allocator's arena fill
# Read now: tests see nothing of the machine's settings.
SOAK_SECONDS: Final = float(os.environ.get("BDN_SOAK_SECONDS") or at_scale(0, FULL_SECONDS))
PAUSE_SECONDS: Final = float(os.environ.get("BDN_SOAK_PAUSE_SECONDS", "0"))


# --- What processes take while they work, sampled, and whether any of it drifts ---
_WARM: Final = 6  # the first sixth of all samples is warm-up, too: pools and allocators grow to their size


@dataclass
class Figure:
    """One quantity over time. ``allowed`` is by how much it may have risen over the sampled time, all in all."""

    name: str
    read: Callable[[], float]
    allowed: float
    samples: list[tuple[float, float]] = field(default_factory=list)

    def sample(self, now: float) -> None:
        self.samples.append((now, self.read()))

    @property
    def drift(self) -> float:
        """The rise of the line that fits the samples after warm-up best, from its first to its last moment.

        A sawtooth, such as a cache that fills and evicts, has none; a leak has its full size.
        """
        kept = self.samples[len(self.samples) // _WARM :]
        return slope(kept) * (kept[-1][0] - kept[0][0])

    @property
    def span(self) -> tuple[float, float]:
        """Least and most after warm-up."""
        values = [value for _, value in self.samples[len(self.samples) // _WARM :]]
        return min(values), max(values)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least squares' line."""
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def figures_of(name: str, pid: int, folders: Mapping[str, tuple[Path, float]]) -> list[Figure]:
    """Descriptors, threads and memory of a process, and what its folders hold, each with what it may rise by."""
    process = Path(f"/proc/{pid}")
    return [
        Figure(f"{name} descriptors", lambda: len(list((process / "fd").iterdir())), allowed=6),
        Figure(f"{name} threads", lambda: len(list((process / "task").iterdir())), allowed=3),
        Figure(f"{name} MB resident", lambda: _resident(process), allowed=12),
        *(
            Figure(f"{name} {what} MB", lambda folder=folder: _disk_bytes(folder) / 1e6, allowed=allowed)  # type: ignore[misc]
            for what, (folder, allowed) in folders.items()
        ),
    ]


def _resident(process: Path) -> float:
    pages = int((process / "statm").read_text().split()[1])
    return pages * 4096 / 1e6


def _disk_bytes(folder: Path) -> int:
    """What lies below it now; folders and files come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size
    return total


def test_a_leak_has_a_slope_and_a_sawtooth_has_none() -> None:
    leak = Figure("leak", lambda: 0, 1, [(second, 100 + 0.5 * second) for second in range(300)])
    saw = Figure("saw", lambda: 0, 1, [(second, 100 + second % 10) for second in range(300)])

    assert leak.drift == pytest.approx(0.5 * 249)
    assert abs(saw.drift) < 1
    assert slope([(1, 5)]) == 0


@pytest.mark.usefixtures("backend")
@pytest.mark.promise("load")
@pytest.mark.skipif(not SOAK_SECONDS, reason="set BDN_SOAK_SECONDS, or run make fault")
async def test_nothing_grows_under_a_mixed_load(hub: Hub, tmp_path: Path, tally: Tally) -> None:
    for number, files in enumerate(FILES):
        hub.repo(f"org/model-{number}").commit(files)
    async with AsyncExitStack() as stack:
        # As deploy/Dockerfile has it: without it sixteen arenas take minutes to fill, and what they hold looks like a leak.
        environment = {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "HF_ENDPOINT": hub.url, "MALLOC_ARENA_MAX": "2"}
        starting = ServingProcess.start(tmp_path / "mirror", command=executed(SERVE), **environment)
        mirror = await stack.enter_async_context(await starting)
        daemons = []
        for name in ("node-1", "node-2"):
            given = {
                "BDN_AGENT_CACHE_BYTES": str(CACHE),
                "BDN_AGENT_NODE": name,
                "BDN_AGENT_CLUSTER_CACHE_BYTES": "4MB",
            }
            program = Program(tmp_path / name, mirror.url, given, executed(COMMAND))
            daemons.append(await stack.enter_async_context(program.daemon()))
        figures = _figures(tmp_path, mirror, daemons)
        load = _Load(mirror, daemons, tally)
        await _fill_pools(mirror, daemons)
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(load.work(worker)) for worker in range(4)]
            await until(lambda: load.rounds >= WARM_ROUNDS, "every model mirrored, staged and evicted", seconds=3600)
            await _sample(figures, SOAK_SECONDS)
            for task in working:
                task.cancel()
    report = [f"{one.name}: {one.span[0]:.1f} to {one.span[1]:.1f}, drift {one.drift:+.2f}" for one in figures]
    print(f"{SOAK_SECONDS:.0f} s, {load.rounds} rounds", *report, sep="\n")
    assert not [line for line, one in zip(report, figures, strict=True) if one.drift > one.allowed]


def _figures(root: Path, mirror: ServingProcess, daemons: Sequence[Daemon]) -> list[Figure]:
    """A mirror keeps a row of a kilobyte or two for each request, and so its database may rise; nothing else may."""
    one_model = 2 * sum(map(len, FILES[0].values())) / 1e6
    stored = Figure("mirror store MB", lambda: sum(mirror.behind.chunks().values()) / 1e6, allowed=0.1)
    figures = [*figures_of("mirror", mirror.process.pid, {}), stored]
    for number, daemon in enumerate(daemons, 1):
        cache = {"cache": (root / f"node-{number}/cache", one_model)}
        figures += figures_of(f"node-{number}", daemon.process.pid, cache)
    return figures


async def _fill_pools(mirror: ServingProcess, daemons: Sequence[Daemon]) -> None:
    """So many questions at once that each process opens all connections and starts all threads that it will ever keep.

    Four workers would have it do so one by one, some only after minutes, and what is full late looks like a leak.
    """
    async with httpx2.AsyncClient(base_url=mirror.url, trust_env=False, timeout=60) as http:
        answers = await asyncio.gather(*(http.get("/manifests") for _ in range(QUESTIONS)))
        assert {answer.status_code for answer in answers} == {200}
        agents = (await http.get("/agents")).json()["items"]
        assert len(agents) == len(daemons)
        for agent in agents:
            chunk = f"{agent['advertise']}/chunks/b3:{0:064x}"
            answers = await asyncio.gather(*(http.get(chunk) for _ in range(QUESTIONS)))
            assert {answer.status_code for answer in answers} == {404}
    for daemon in daemons:
        await asyncio.gather(*(daemon.client.cache() for _ in range(QUESTIONS)))


async def _sample(figures: Sequence[Figure], seconds: float) -> None:
    """At least sixty times."""
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        for figure in figures:
            figure.sample(now)
        await asyncio.sleep(min(5.0, seconds / 60))


class _Load:
    """Four workers that mirror, listen, stage, look at the files, and let go, one model after the other."""

    def __init__(self, mirror: ServingProcess, daemons: Sequence[Daemon], tally: Tally) -> None:
        self.rounds = 0
        self._mirror = mirror
        self._daemons = daemons
        self._tally = tally

    async def work(self, worker: int) -> None:
        async for number in _endless(worker):
            await self._round(number, self._daemons[worker % len(self._daemons)], f"job-{worker}")
            self.rounds += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _round(self, number: int, daemon: Daemon, job: str) -> None:
        mirror_id = await self._mirror.begin(source(f"hf://org/model-{number}"))
        await self._listen_and_vanish(mirror_id)
        document = await self._mirror.ended(mirror_id)
        self._tally.add(scenarios=1, lost=document["status"] != "READY")
        await self._mirror.begin(source("hf://org/nothing"))
        with suppress(BdnError):  # two stages of other models may fill the cache: that is an answer, too
            stage = await daemon.client.stage(StageRequest(job_id=job, grant=document["grant"], wait=True))
            if stage.state == "READY":
                found = await asyncio.to_thread(tree, Path(str(stage.mounts[0].path)))
                self._tally.add(scenarios=1, wrong=found != FILES[number])
            await daemon.client.unstage(stage.id)

    async def _listen_and_vanish(self, mirror_id: str) -> None:
        with suppress(httpx2.TransportError):
            async with self._mirror.http.stream("GET", f"/mirror/{mirror_id}/events") as answer:
                async for _ in answer.aiter_lines():
                    return


async def _endless(worker: int) -> AsyncIterator[int]:
    """Numbers of models, in another order for each worker."""
    number = worker
    while True:
        yield number % MODELS
        number += 2 * worker + 1
