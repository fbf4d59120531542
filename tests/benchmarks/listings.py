"""How much memory, time and asking a source of very many files takes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx2

from tests.benchmarks.report import Figure
from tests.doubles.hub import Hub
from tests.doubles.s3_numbers import NAME, NumberedBucket
from tests.support.commands import Shell, wait_until

INTRODUCTION = """
A mirror in a process of its own (`bdn serve`, all defaults) and doubles of a hub and of S3 that page by 1000. Every object
holds a few bytes, so these are figures of files, not of bytes: *plan* is `POST /mirror?dry_run=true` (list, select, compare),
*mirrored* is everything up to READY, and *unchanged* is the same source again, of which nothing is read. CPU is that of the
mirror's process, all its threads, divided by the number of files; memory is its `VmHWM`, which only grows from one row to the
next. `BDN_BENCH_SCALE` makes everything smaller (1).
"""
FILES, OBJECTS = 50_000, 200_000
MEMORY = "< 600"


def measure() -> list[Figure]:
    """A repository and a bucket."""
    scale = float(os.environ.get("BDN_BENCH_SCALE", "1"))
    return [*_repository(int(FILES * scale)), *_bucket(int(OBJECTS * scale))]


def _repository(count: int) -> list[Figure]:
    with Hub() as hub:
        repository = hub.repo("org/large")
        repository.commit({f"data/{n // 1000:04}/{n:07}.txt": b"%d" % n for n in range(count)})
        with _mirror({"HF_ENDPOINT": hub.url}) as mirror:
            title, source = f"hf, {count} files", "hf://org/large"
            figures = _steps(mirror, title, source, count, hub.log.count, before_again=lambda: repository.commit({}))
        assert hub.log.count("/resolve/") == count
    return figures


def _bucket(count: int) -> list[Figure]:
    with NumberedBucket(count) as bucket, _mirror({"AWS_ENDPOINT_URL_S3": bucket.url}) as mirror:
        figures = _steps(mirror, f"s3, {count} objects", f"s3://{NAME}/", count, bucket.log.count)
        for part in (bucket.keys[0].rpartition("/")[0], "data/00"):
            bucket.log.clear()
            plan = mirror.plan(f"s3://{NAME}/", allow_patterns=[f"{part}*/*"])
            figures.append(Figure(f"plan of `{part}*/*`, {plan['files']} files", "requests", (bucket.log.count(),)))
    return figures


@dataclass
class _Mirror:
    http: httpx2.Client
    process: Popen[str]

    def plan(self, source: str, **patterns: Any) -> Any:
        return self._post(source, {"dry_run": "true"}, **patterns)

    def ready(self, source: str) -> Any:
        mirror = self._post(source, {})
        while mirror["status"] in {"PENDING", "SYNCING"}:
            mirror = self.http.get(f"/mirror/{mirror['id']}?wait=60").raise_for_status().json()
        assert mirror["status"] == "READY", mirror
        return mirror

    def _post(self, source: str, params: dict[str, str], **patterns: Any) -> Any:
        body = {"weights": [{"source": source, "mount_location": "/weights", **patterns}]}
        return self.http.post("/mirror", params=params, json=body).raise_for_status().json()

    @property
    def peak_megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1000

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _mirror(upstream: dict[str, str]) -> Iterator[_Mirror]:
    with tempfile.TemporaryDirectory() as folder:
        ports = {"BDN_PORT": "18460", "BDN_DATA_PORT": "18461", "BDN_EGRESS_ALLOW": "127.0.0.1"}
        shell = Shell(Path(folder), {**upstream, **ports})
        with (
            shell.running("bdn", "serve") as process,
            httpx2.Client(base_url="http://127.0.0.1:18460", timeout=900, trust_env=False) as http,
        ):
            wait_until(lambda: _is_ready(http), what="the mirror")
            yield _Mirror(http, process)


def _is_ready(http: httpx2.Client) -> bool:
    try:
        return http.get("/readyz").is_success
    except httpx2.TransportError:
        return False


def _steps(
    mirror: _Mirror,
    title: str,
    source: str,
    count: int,
    requests: Callable[[], int],
    before_again: Callable[[], object] = bool,
) -> list[Figure]:
    figures: list[Figure] = []

    def step(name: str, work: Callable[[], Any], requests_asked: str = "") -> Any:
        asked, cpu, began = requests(), mirror.cpu_seconds, time.perf_counter()
        done = work()
        seconds, cpu = time.perf_counter() - began, mirror.cpu_seconds - cpu
        figures.extend(
            [
                Figure(f"{title}, {name}: time", "s", (seconds,)),
                Figure(f"{title}, {name}: CPU per file", "µs", (cpu / count * 1e6,)),
                Figure(f"{title}, {name}: requests", "", (requests() - asked,), requests_asked),
                Figure(f"{title}, {name}: memory", "MB", (mirror.peak_megabytes,), MEMORY),
            ]
        )
        return done

    limit = "< 60" if count <= FILES else ""
    plan = step("plan", lambda: mirror.plan(source))
    assert plan["files"] == count
    first = step("mirrored", lambda: mirror.ready(source))
    assert first["bytes_transferred"] == plan["bytes"]
    before_again()
    again = step("unchanged", lambda: mirror.ready(source), limit)
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, plan["bytes"])
    return figures
