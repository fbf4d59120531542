"""How fast the data plane serves chunks: beside nginx from memory, beside the disk itself from the disk."""

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.wire.http_fields import chunk_path
from tests.benchmarks import disk, nginx, prototype
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import RUNS, Figure, Missing, Row, ratios, scaled_size

SIZE, THREADS, COLD_THREADS = 2 * 1024**3, 4, 8


def measure() -> list[Row]:
    """The same chunk files behind both servers: from memory beside nginx, from the disk beside fio."""
    ours, theirs, cold, direct = [], [], [], []
    with mirrored(1, scaled_size(SIZE)) as content, nginx.serving(f"root {content.mirror.store};") as other:
        store, server = content.mirror.store, content.mirror.data_url
        files = disk.files_below(store)
        gigabytes = len(files) * CHUNK_SIZE / 1e9
        chunks = [chunk_path(Digest(path.name)) for path in files]
        for _ in range(RUNS):
            disk.keep(files)
            ours.append(gigabytes / prototype.pull(server, chunks, THREADS))
            theirs.append(gigabytes / prototype.pull(other, [f"/{path.relative_to(store)}" for path in files], THREADS))
        for _ in range(RUNS):
            disk.drop(files)
            cold.append(gigabytes / prototype.pull(server, chunks, COLD_THREADS))
            disk.drop(files)
            if not disk.missing_fio():
                direct.append(disk.read(store, COLD_THREADS))
    beside: list[Row] = [Missing("cold: fio's direct read", disk.missing_fio(), ">= 0.9")]
    if direct:
        beside = [
            Figure("cold: fio's direct read", "GB/s", direct),
            Figure("cold: ratio, pair by pair", "x", ratios(cold, direct), ">= 0.9"),
        ]
    return [
        Figure("chunk server", "GB/s", ours),
        Figure("nginx", "GB/s", theirs),
        Figure("ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.75"),
        Figure("cold: chunk server", "GB/s", cold),
        *beside,
    ]
