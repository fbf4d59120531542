"""How fast an agent fills its disk from the mirror, beside the disk itself, and what verification costs of that.

With a disk that is capped at several rates it shows which disk is the limit, and not the code.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import disk
from bench.mirrored import ColdStages, mirrored
from bench.report import RUNS, Figure, Missing, Row, ratios, scaled_size

FILES, SIZE, IN_FLIGHT = 4, 2 * 1024**3, 8
CAPS = (1.2, 1.6, 2.0, 2.4)  # GB/s


def measure() -> list[Row]:
    """The agent with and without verification, and the disk, in turn."""
    direct: list[float] = []
    with (
        mirrored(FILES, scaled_size(SIZE)) as content,
        content.agent("verifying") as verifying,
        content.agent("believing", "believing") as believing,
    ):
        ours, unverified = ColdStages(content, verifying), ColdStages(content, believing)
        for _ in range(RUNS):
            ours.run()
            if not disk.missing_fio():
                direct.append(disk.write(content.root, content.files, content.size, IN_FLIGHT))
            unverified.run()
        peak = verifying.peak_megabytes
    title = f"{FILES} x {content.size // 1024**2} MiB"
    slower = tuple(100 * (ratio - 1) for ratio in ratios(unverified.rates, ours.rates))
    return [
        *_beside_fio(title, ours.rates, direct),
        Figure(f"{title}: CPU of the agent", "s/GB", ours.cpu, "<= 0.8"),
        Figure(f"{title}: memory of the agent", "MB", (peak,), "<= 1074"),
        Figure(f"{title}: unverified", "GB/s", unverified.rates),
        Figure(f"{title}: CPU of the agent, unverified", "s/GB", unverified.cpu),
        Figure(f"{title}: verification, pair by pair", "%", slower, "<= 10"),
    ]


def _beside_fio(title: str, ours: list[float], theirs: list[float]) -> list[Row]:
    cold = Figure(f"{title}: cold stage", "GB/s", ours)
    if not theirs:
        return [cold, Missing(f"{title}: fio's direct write", disk.missing_fio(), ">= 0.90")]
    return [
        cold,
        Figure(f"{title}: fio's direct write", "GB/s", theirs),
        Figure(f"{title}: ratio to fio, pair by pair", "x", ratios(ours, theirs), ">= 0.90"),
    ]


def measure_capped() -> list[Row]:
    """The agent and the disk in turn, at each rate."""
    if why := disk.missing_fio() or no_cap():
        return [Missing("fill of a disk that is capped", why)]
    rows: list[Row] = []
    with (
        mirrored(FILES, scaled_size(SIZE)) as content,
        capped_disk(content.root) as capped,
        content.agent("capped") as agent,
    ):
        capped.take(agent.process.pid)
        for cap in CAPS:
            capped.cap(cap)
            ours, theirs = ColdStages(content, agent, checked=cap != CAPS[0]), list[float]()
            for _ in range(RUNS):
                ours.run()
                theirs.append(disk.write(content.root, content.files, content.size, IN_FLIGHT, capped.within))
            rows += _beside_fio(f"a disk of {cap} GB/s", ours.rates, theirs)
    return rows


_CONTROLLER: Final = Path("/sys/fs/cgroup/blkio")
_LIMIT: Final = "blkio.throttle.write_bps_device"


def no_cap() -> str:
    """Why it cannot be had; empty when it can."""
    return "" if os.access(_CONTROLLER / _LIMIT, os.W_OK) else "needs root and the blkio controller of cgroup v1"


@dataclass(frozen=True)
class CappedDisk:
    """The disk below a folder, as slow as ``cap`` says for whoever it is told of. Past the page cache only: others write back."""

    group: Path
    device: str

    @property
    def within(self) -> tuple[str, ...]:
        """The beginning of a command that is to have this disk."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group / "cgroup.procs"))

    def take(self, process: int) -> None:
        """This process has this disk from now on."""
        (self.group / "cgroup.procs").write_text(str(process))

    def cap(self, rate: float) -> None:
        """It writes ``rate`` GB/s at most from now on."""
        (self.group / _LIMIT).write_text(f"{self.device} {int(rate * 1e9)}")


@contextmanager
def capped_disk(folder: Path) -> Iterator[CappedDisk]:
    """The disk that ``folder`` lies on. Its processes have ended when the block ends."""
    group = _CONTROLLER / f"bdn-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        yield CappedDisk(group, disk.number_of(folder))
    finally:
        group.rmdir()
