"""How fast the data plane serves chunks: beside nginx from memory, beside the disk itself from the disk."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.wire.http_fields import chunk_path
from tests.benchmarks import fio, nginx, page_cache, prototype
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size

INTRODUCTION = """
2 GiB of chunks of 8 MiB in the store of `bdn serve`, read from its data plane and, in turn, from nginx that serves the same files, by the same
client: `http.client` in 4 threads that read into 8 MiB of memory each. *cold*: the chunks are dropped from the page cache before each run, 8 threads read
them, and fio reads the same files with direct I/O, 8 blocks of 8 MiB at any time. Nobody verifies.
"""
SIZE, THREADS, COLD_THREADS = 2 * 1024**3, 4, 8


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
                disk.append(fio.read(served.store, COLD_THREADS))
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


@contextlib.contextmanager
def _served() -> Iterator[_Served]:
    with mirrored(1, scaled_size(SIZE)) as content, nginx.serving(f"root {content.mirror.store};") as theirs:
        chunks = page_cache.files_below(content.mirror.store)
        yield _Served(content.mirror.data_url, theirs, content.mirror.store, tuple(chunks))
