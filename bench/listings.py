"""How much memory, time and asking a source of very many files takes."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.numbered_bucket import NAME, NumberedBucket
from bench.report import Figure, scaled
from tests.doubles.hub import Hub
from tests.support.services import services
from tests.support.services.processes import cpu_seconds, peak_megabytes

FILES, OBJECTS = 50_000, 200_000
MEMORY = "< 600"


def measure() -> list[Figure]:
    """A repository and a bucket."""
    return [*_repository(scaled(FILES)), *_bucket(scaled(OBJECTS))]


def _repository(count: int) -> list[Figure]:
    with Hub() as hub:
        repository = hub.repo("org/large")
        repository.commit({f"data/{n // 1000:04}/{n:07}.txt": b"%d" % n for n in range(count)})
        with _mirror(HF_ENDPOINT=hub.url) as mirror:
            title, source = f"hf, {count} files", "hf://org/large"
            figures = _steps(mirror, title, source, count, hub.log.count, before_again=lambda: repository.commit({}))
        assert hub.log.count("/resolve/") == count
    return figures


def _bucket(count: int) -> list[Figure]:
    with NumberedBucket(count) as bucket, _mirror(AWS_ENDPOINT_URL_S3=bucket.url) as mirror:
        figures = _steps(mirror, f"s3, {count} objects", f"s3://{NAME}/", count, bucket.log.count)
        for part in (bucket.keys[0].rpartition("/")[0], "data/00"):
            bucket.log.clear()
            plan = mirror.plan(f"s3://{NAME}/", allow_patterns=[f"{part}*/*"])
            figures.append(Figure(f"plan of `{part}*/*`, {plan['files']} files", "requests", (bucket.log.count(),)))
    return figures


@contextmanager
def _mirror(**upstream: str) -> Iterator[services.Mirror]:
    with tempfile.TemporaryDirectory() as folder, services.mirror(Path(folder) / "mirror", **upstream) as mirror:
        yield mirror


def _steps(
    mirror: services.Mirror,
    title: str,
    source: str,
    count: int,
    requests: Callable[[], int],
    before_again: Callable[[], object] = bool,
) -> list[Figure]:
    figures: list[Figure] = []

    def step(name: str, work: Callable[[], Any], requests_asked: str = "") -> Any:
        asked, cpu, began = requests(), cpu_seconds(mirror.process.pid), time.perf_counter()
        done = work()
        seconds, cpu = time.perf_counter() - began, cpu_seconds(mirror.process.pid) - cpu
        figures.extend(
            [
                Figure(f"{title}, {name}: time", "s", (seconds,)),
                Figure(f"{title}, {name}: CPU per file", "µs", (cpu / count * 1e6,)),
                Figure(f"{title}, {name}: requests", "", (requests() - asked,), requests_asked),
                Figure(f"{title}, {name}: memory", "MB", (peak_megabytes(mirror.process.pid),), MEMORY),
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
