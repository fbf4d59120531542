"""Summarise a training cache while jobs write to it: follows no links, in bounded memory."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import CanceledError
from bdn.core.training.cache_summary import ENTRIES_LIMIT, CacheSummary, SummaryEntry
from bdn.disk.durable import disk_errors, opened

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DEEPEST: Final = 128  # folders open at once; deeper entries are not counted


def summarized(root: Path, stop: threading.Event, limit: int = ENTRIES_LIMIT) -> CacheSummary:
    """Summarise everything below ``root``, whose parents belong to the agent. Blocking.

    Skips entries that cannot be read or are on another file system. Raises ``DiskFailedError`` for ``root`` itself,
    and ``CanceledError`` after ``stop``.
    """
    with disk_errors(root), opened(root, _FOLDER) as folder:
        walk = _Walk(CacheSummary(limit), os.fstat(folder).st_dev, stop)
        walk.through(folder, "", 0)
        return walk.summary


@dataclass(frozen=True, slots=True)
class _Walk:
    summary: CacheSummary
    device: int
    stop: threading.Event

    def through(self, folder: int, prefix: str, depth: int) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if self.stop.is_set():
                    raise CanceledError("the summary of a training cache")
                with suppress(OSError):  # deleted, swapped, or not readable
                    found = entry.stat(follow_symlinks=False)
                    if found.st_dev != self.device:
                        continue
                    path = prefix + entry.name
                    self.summary.add(SummaryEntry(path, found.st_size, found.st_mtime, found.st_mode))
                    if entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                        with opened(entry.name, _FOLDER, folder) as below:
                            if os.fstat(below).st_dev == self.device:
                                self.through(below, f"{path}/", depth + 1)
