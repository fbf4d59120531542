"""How fast the data plane serves chunks, and how fast an engine without a disk takes them in."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.connections import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.transfer.verifying import VerifyingReader
from bdn.wire.paths import chunk_path
from tests.benchmarks import fio, nginx, page_cache, prototype, s3_origin
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size
from tests.support import services

INTRODUCTION = """
2 GiB of chunks of 8 MiB in the store of `bdn serve`, read from its data plane and, in turn, from nginx that serves the very
same files, by the same client: `http.client` in 4 threads, each with 8 MiB of memory that it uses again. Then *cold*: the
chunks are dropped from the page cache before each run, 8 threads of the client read them, and fio reads the same files with
direct I/O, 8 blocks of 8 MiB at any time. Content comes as it lies there; nobody verifies.
"""
SINK_INTRODUCTION = """
The agent's engine (its byte threads, its reader of chunks, BLAKE3 of every chunk) takes 2 GiB from the data plane of
`bdn serve` and discards them, in turn with the plainest fast client (`http.client`, 4 threads, each reading into 8 MiB of
memory that it uses again, nothing verified) that takes the same files from nginx. Both servers have them in the page cache.
"""
SIZE, PREFIX, THREADS, COLD_THREADS = 2 * 1024**3, "model", 4, 8


@dataclass(frozen=True)
class _Served:
    """The same chunk files behind both servers."""

    ours: str
    theirs: str
    store: Path
    chunks: tuple[Path, ...]

    @property
    def gigabytes(self) -> float:
        return len(self.chunks) * CHUNK_SIZE / 1e9

    @property
    def digests(self) -> list[Digest]:
        return [Digest(path.name) for path in self.chunks]

    def from_ours(self, threads: int) -> float:
        seconds = prototype.pull(self.ours, [chunk_path(digest) for digest in self.digests], threads)
        return self.gigabytes / seconds

    def from_theirs(self, threads: int) -> float:
        paths = [f"/{path.relative_to(self.store)}" for path in self.chunks]
        return self.gigabytes / prototype.pull(self.theirs, paths, threads)


def measure() -> list[Row]:
    """From memory beside nginx, from the disk beside fio."""
    ours, theirs, cold, disk = [], [], [], []
    with _served() as served:
        for _ in range(RUNS):
            page_cache.keep(served.chunks)
            ours.append(served.from_ours(THREADS))
            theirs.append(served.from_theirs(THREADS))
        for _ in range(RUNS):
            page_cache.drop(served.chunks)
            cold.append(served.from_ours(COLD_THREADS))
            page_cache.drop(served.chunks)
            if not fio.missing():
                disk.append(fio.read(served.chunks, COLD_THREADS))
    beside: list[Row] = [Missing("cold: fio's direct read", fio.missing(), ">= 0.9")]
    if disk:
        beside = [
            Figure("cold: fio's direct read", "GB/s", tuple(disk)),
            Figure("cold: ratio, pair by pair", "x", ratios(cold, disk), ">= 0.9"),
        ]
    return [
        Figure("chunk server", "GB/s", tuple(ours)),
        Figure("nginx", "GB/s", tuple(theirs)),
        Figure("ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.75"),
        Figure("cold: chunk server", "GB/s", tuple(cold)),
        *beside,
    ]


def measure_sink() -> list[Row]:
    """The engine without a disk, beside the prototype."""
    ours, theirs = [], []
    with _served() as served:
        for _ in range(RUNS):
            page_cache.keep(served.chunks)
            ours.append(served.gigabytes / asyncio.run(_sink(served)))
            theirs.append(served.from_theirs(THREADS))
    return [
        Figure("engine, verified", "GB/s", tuple(ours)),
        Figure("prototype from nginx", "GB/s", tuple(theirs)),
        Figure("ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.7"),
    ]


async def _sink(served: _Served) -> float:
    connections, threads = ConnectionPool(timeout_seconds=20), ByteThreads(8, "bench")
    reader = VerifyingReader(HttpChunkReader(connections, served.ours))
    todo = iter(served.digests)

    async def take() -> None:
        for digest in todo:
            await threads.run(CHUNK_SIZE, lambda buffer, digest=digest: reader.read_into(digest, buffer))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(2 * threads.count):
            group.create_task(take())
    seconds = time.perf_counter() - began
    threads.close()
    connections.close()
    return seconds


@contextlib.contextmanager
def _served() -> Iterator[_Served]:
    with (
        tempfile.TemporaryDirectory() as name,
        s3_origin.serving({PREFIX: (1, scaled_size(SIZE))}) as origin,
        services.mirror(Path(name) / "mirror", AWS_ENDPOINT_URL_S3=origin.url) as mirror,
        nginx.serving(f"root {mirror.store};") as theirs,
    ):
        mirror.ready(f"s3://{s3_origin.BUCKET}/{PREFIX}/")
        shutil.rmtree(origin.bucket)
        chunks = [path for path in page_cache.files_below(mirror.store) if path.stat().st_size == CHUNK_SIZE]
        yield _Served(mirror.data_url, theirs, mirror.store, tuple(chunks))
