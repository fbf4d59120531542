"""The disk below a folder, and when it has nothing to do."""

import os
import time
from pathlib import Path
from typing import Final

_QUIET_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 60.0


def number_of(folder: Path) -> str:
    """``major:minor`` of the whole disk, also when the folder lies on a partition of it. Raises ``OSError`` without a disk."""
    device = folder.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    if (found / "partition").exists():
        found = found.parent
    return (found / "dev").read_text().strip()


def settle(folder: Path) -> None:
    """Wait until the disk is quiet. Who writes next shall not pay for the blocks that somebody else gave back before.

    A file system that is mounted with ``discard`` tells the disk of freed blocks behind everybody's back, for seconds, and
    what is written to blocks that it has not told of yet may be several times as fast.
    """
    os.sync()
    try:
        statistics = Path(f"/sys/dev/block/{number_of(folder)}/stat")
    except OSError:
        return  # a file system in memory
    end, before = time.monotonic() + _LONGEST_SECONDS, ""
    while (now := statistics.read_text()) != before:
        assert time.monotonic() < end, "somebody else is using the disk"
        before = now
        time.sleep(_QUIET_SECONDS)
