"""What processes take while they work, sampled, and whether any of it drifts."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Final

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
