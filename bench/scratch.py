"""A job's scratch, a file system of its own in a file, beside the directory in which it lies: fio writes and reads both in turn."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bench import disk
from bench.report import RUNS, Figure, Missing, Row, ratios, scaled_size
from node_agent.job.bounds import BoundedFolder, can_make_images

_FILES: Final = 4
_SIZE: Final = 512 * 1024**2  # of each
_IN_FLIGHT: Final = 8
_ASKED: Final = ">= 0.90"


def measure() -> list[Row]:
    """Both with the same fio; the bare directory first in every other pair."""
    with tempfile.TemporaryDirectory() as name:
        root, bare = Path(name), Path(name, "bare")
        bare.mkdir()
        if why := disk.missing_fio() or ("" if can_make_images(root) else "nothing can be mounted here"):
            return [Missing("scratch", why, _ASKED)]
        size = scaled_size(_SIZE)
        scratch = BoundedFolder(root / "scratch", _FILES * size * 2, "image", is_kept=False)
        scratch.open()
        try:
            return [
                *_pairs("written", scratch.place, bare, lambda folder: disk.write(folder, _FILES, size, _IN_FLIGHT)),
                *_pairs("read", _filled(scratch.place, size), _filled(bare, size), _read),
            ]
        finally:
            scratch.close()


def _pairs(what: str, scratch: Path, bare: Path, rate: Callable[[Path], float]) -> list[Row]:
    rates: dict[Path, list[float]] = {scratch: [], bare: []}
    for number in range(RUNS):
        for folder in (scratch, bare) if number % 2 else (bare, scratch):
            rates[folder].append(rate(folder))
    return [
        Figure(f"{what}: scratch", "GB/s", rates[scratch]),
        Figure(f"{what}: the bare directory", "GB/s", rates[bare]),
        Figure(f"{what}: ratio, pair by pair", "x", ratios(rates[scratch], rates[bare]), _ASKED),
    ]


def _filled(folder: Path, size: int) -> Path:
    for number in range(_FILES):
        with (folder / f"file-{number}").open("wb", buffering=0) as file:
            for _ in range(size // CHUNK_SIZE):
                file.write(bytes(CHUNK_SIZE))
    return folder


def _read(folder: Path) -> float:
    disk.drop(disk.files_below(folder))
    disk.settle(folder.parent)
    return disk.read(folder, _IN_FLIGHT)
