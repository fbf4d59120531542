"""A disk that writes no faster than it is told to, for some processes: the block controller of cgroup v1."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.benchmarks import disk

_CONTROLLER: Final = Path("/sys/fs/cgroup/blkio")
_LIMIT: Final = "blkio.throttle.write_bps_device"


def missing() -> str:
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
