"""What it takes to write and to read the root and the pages of a manifest of very many small files."""

import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence

from bdn.core.manifest import ManifestWriter, PlacedFile, files_of, slab_cutter, slab_layouts
from bench.report import Figure, scaled
from tests.support.content.names import named

_SIZE = 100  # of a file


def measure() -> Sequence[Figure]:
    """A manifest of a million files: CPU, and what is in memory at most beside its pages."""
    count = scaled(1_000_000)
    files, written = list(_files(count)), list[bytes]()
    what = f"root and pages of {count} files"
    figures = [
        Figure(f"{what}: written", "s CPU", (_cpu(lambda: written.extend(_written(files))),)),
        Figure(f"{what}: size", "MB", (sum(map(len, written)) / 1e6,)),
        Figure(f"{what}: pages", "", (len(written) - 1,)),
        Figure(f"{what}: read", "s CPU", (_cpu(lambda: _exhaust(files_of(written[:-1]))),)),
    ]
    tracemalloc.start()
    works: dict[str, Callable[[], object]] = {
        "write": lambda: _exhaust(_written(files)),
        "read": lambda: _exhaust(files_of(written[:-1])),
    }
    for name, work in works.items():
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        work()
        peak = tracemalloc.get_traced_memory()[1] - before
        figures.append(Figure(f"{what}: memory to {name} them", "MB", (peak / 1e6,), "<= 100"))
    tracemalloc.stop()
    return figures


def _files(count: int) -> Iterator[PlacedFile]:
    cutter = slab_cutter()
    for number in range(count):
        path = f"train-{number // 1000:05}/sample-{number:08}.json"
        for slab in cutter.add((path, _SIZE, named(path)), path, _SIZE):
            yield from slab_layouts(slab, named(f"slab {slab[0][0]}"), len(slab) * _SIZE)
    for slab in cutter.finish():
        yield from slab_layouts(slab, named(f"slab {slab[0][0]}"), len(slab) * _SIZE)


def _written(files: Iterable[PlacedFile]) -> Iterator[bytes]:
    writer = ManifestWriter()
    for file in files:
        for page in writer.add(file):
            yield page.content
    for document in writer.finish():
        yield document.content


def _exhaust(items: Iterable[object]) -> None:
    for _ in items:
        pass


def _cpu(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
