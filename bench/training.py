"""From ``truss train push`` to the first command of a job whose weights are on its node already."""

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.report import RUNS, Figure, Missing, Row, scaled_size
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.agent.mounts import may_mount, unmounting
from tests.support.agent.runs import why_no_sandbox
from tests.support.network.fault_proxy import FaultProxy
from tests.support.services.cluster import Cluster
from tests.support.services.training import CLIENTS, User, agent, over

_WEIGHTS: Final = 64 * 1024**2
_ASKED: Final = "<= 3"
_PIECE: Final = 64 * 1024
_POST: Final = re.compile(r"POST /v1/training_projects/\w+/jobs HTTP")
_DEPLOYING, _RUNNING, _FIRST = "mirrored; staging", "all ranks are staged", "the first command starts at "
_JOB: Final = f"""
from truss_train import Image, Runtime, TrainingJob, TrainingProject, WeightsSource

training_project = TrainingProject(name="bench", job=TrainingJob(
    image=Image(base_image="python:3.11-slim"),
    runtime=Runtime(start_commands=["date '+{_FIRST}%s.%N'"]),
    weights=[WeightsSource(source="hf://org/model", mount_location="/app/model")],
))
"""


def measure() -> list[Row]:
    """The same job again and again, after one that brings the weights to the node."""
    if reason := _why_not():
        return [Missing("training", reason, _ASKED)]
    with _bench() as bench:
        bench.push()
        pushes = [bench.push() for _ in range(2 * RUNS)]
    return _figures(pushes)


def _why_not() -> str | None:
    if not CLIENTS.exists():
        return "truss is not installed; make test installs it"
    return why_no_sandbox() or (None if may_mount() else "nothing can be mounted here")


@dataclass(frozen=True)
class _Push:
    """When what happened, in seconds since the epoch."""

    begun: float
    posted: float
    created: float
    deploying: float
    running: float
    commanded: float


def _figures(pushes: Sequence[_Push]) -> list[Row]:
    return [
        Figure("push to first command", "s", [one.commanded - one.begun for one in pushes], _ASKED),
        Figure("push to POST: truss and its upload", "s", [one.posted - one.begun for one in pushes]),
        Figure("POST to first command", "s", [one.commanded - one.posted for one in pushes]),
        Figure("POST to CREATED", "ms", [1000 * (one.created - one.posted) for one in pushes]),
        Figure("CREATED to DEPLOYING", "ms", [1000 * (one.deploying - one.created) for one in pushes]),
        Figure("DEPLOYING to RUNNING", "ms", [1000 * (one.running - one.deploying) for one in pushes]),
        Figure("RUNNING to first command", "ms", [1000 * (one.commanded - one.running) for one in pushes]),
    ]


@dataclass
class _Arrivals(FaultProxy):
    """Passes on bytes, and notes when each connection's first request came: ``bdn truss`` has one for each request."""

    times: list[tuple[float, str]] = field(default_factory=list)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.times.append((time.time(), head.decode("latin-1")))
        there, back = await asyncio.open_connection(*self.target)
        back.write(head)
        sending = asyncio.ensure_future(_copy(reader, back))
        try:
            await _copy(there, writer)
        finally:
            sending.cancel()
            back.transport.abort()

    def of_newest_job(self) -> float:
        return next(at for at, head in reversed(self.times) if _POST.match(head))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()


@dataclass(frozen=True)
class _Bench:
    user: User
    arrivals: _Arrivals
    config: Path

    def push(self) -> _Push:
        begun = time.time()
        job = self.user.push_config(self.config)
        assert over(self.user, job) == ("COMPLETED", "")
        lines = self._lines(job)
        return _Push(
            begun=begun,
            posted=self.arrivals.of_newest_job(),
            created=_at(lines, "the job is created"),
            deploying=_at(lines, _DEPLOYING),
            running=_at(lines, _RUNNING),
            commanded=float(next(line["message"] for line in lines if _FIRST in line["message"]).split()[-1]),
        )

    def _lines(self, job: str) -> Any:
        with self.user.cluster.http() as http:
            path = f"/v1/training_projects/{self.user.job(job)['training_project_id']}/jobs/{job}/logs"
            return http.post(path, json={"direction": "asc", "limit": 1000}).raise_for_status().json()["logs"]


def _at(lines: Any, beginning: str) -> float:
    return next(int(line["timestamp"]) / 1e9 for line in lines if line["message"].startswith(beginning))


@contextmanager
def _bench() -> Iterator[_Bench]:
    """A mirror and an agent, started as users start them."""
    with tempfile.TemporaryDirectory() as name, Hub() as hub, unmounting(Path(name)):
        root = Path(name)
        hub.repo("org/model").commit({"model.safetensors": GeneratedContent(scaled_size(_WEIGHTS))})
        folder = root / "job"
        folder.mkdir()
        (folder / "config.py").write_text(_JOB)
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url}, is_forked=False)
        with (
            cluster.mirror(),
            agent(cluster) as shell,
            _Arrivals(("127.0.0.1", cluster.port)).running() as arrivals,
        ):
            assert isinstance(arrivals, _Arrivals)
            user = User(cluster, replace(shell, extra={**shell.extra, "BDN_URL": arrivals.url}))
            yield _Bench(user, arrivals, folder / "config.py")
