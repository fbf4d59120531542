"""Bytes that are on the disk and under no name of their own yet."""

from __future__ import annotations

import threading


class Aside:
    """A count, in bytes, of small files that are being written beside whole ones. Shared by threads.

    Files in progress with a part in ``filling`` are not counted here: those can be seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.size = 0

    def add(self, size: int) -> None:
        """They are about to be written; negative when they are gone, or have become whole files."""
        with self._lock:
            self.size += size
