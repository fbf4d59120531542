"""What the kernel keeps of files in memory: made so, or made not so, before a clock starts."""

import os
from collections.abc import Iterable
from pathlib import Path

_PIECE = 8 * 1024**2


def files_below(folder: Path) -> list[Path]:
    """All of them, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def keep(paths: Iterable[Path]) -> None:
    """Read everything, so that the next reader gets it from memory."""
    buffer = bytearray(_PIECE)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Iterable[Path]) -> None:
    """Let go of everything, so that the next reader gets it from the disk. Only clean pages can go: sync first."""
    os.sync()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
