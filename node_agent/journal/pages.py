"""A file of lines that only grows, and the one before it: so much is kept, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bdn.disk.durable import make_folder

PAGE_SIZE: Final = 8 * 1024 * 1024  # two of these are 40,000 lines and more
_PRIVATE: Final = 0o700


class Pages:
    """Two pages in a folder. Blocking; one caller at a time. Methods raise ``OSError``, after which the next call tries anew.

    A line that a kill, a full disk or a power cut has left half is followed by a line end and passed over by readers: it
    never takes its neighbours with it.
    """

    def __init__(self, folder: Path, size: int = PAGE_SIZE) -> None:
        self._folder = folder
        self._size = size
        self._descriptor: int | None = None
        self._written = 0
        self._is_torn = False

    @property
    def current(self) -> Path:
        """Where lines are added."""
        return self._folder / "journal.jsonl"

    @property
    def earlier(self) -> Path:
        """The page before."""
        return self._folder / "journal.1.jsonl"

    def append(self, lines: bytes, *, is_synced: bool) -> None:
        """Add whole lines. They outlive this process when it returns and, if ``is_synced``, the machine's power."""
        descriptor = self._open()
        try:
            content = b"\n" + lines if self._is_torn else lines
            self._is_torn = True  # until all of it is there
            while content:
                count = os.write(descriptor, content)
                self._written += count
                content = content[count:]
            self._is_torn = False
            if is_synced:
                os.fdatasync(descriptor)
            if self._written >= self._size:
                self.close()
                self.current.replace(self.earlier)
        except OSError:
            self.close()
            raise

    def newest_first(self) -> Iterator[bytes]:
        """Every line, whole or not, from the last to the first."""
        for page in (self.current, self.earlier):
            try:
                content = page.read_bytes()
            except FileNotFoundError:
                continue
            yield from (line for line in reversed(content.split(b"\n")) if line)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            make_folder(self._folder, _PRIVATE)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.current, flags, 0o600)
            self._written = os.fstat(self._descriptor).st_size
            last = os.pread(self._descriptor, 1, self._written - 1) if self._written else b"\n"
            self._is_torn = last != b"\n"
        return self._descriptor
