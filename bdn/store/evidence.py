"""Wrong bytes that were found under a chunk's name: kept for people to look at, out of every reader's way, and not too many."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from bdn.core.digest import Digest
from bdn.store.soundness import fault_of

KEPT: Final = 64  # of at most a chunk each; the oldest go


class Evidence:
    """A folder of files named ``<nanoseconds>-<digest>``: when they were found, and what they should have been."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, path: Path, digest: Digest) -> bool:
        """Move the file here if it is wrong. False when there is none, or it is right, and then it stays where it is.

        A and B read wrong bytes; A moves them, and right ones take their place; B comes to move what it has seen. So what was
        moved is read once more and, if it is right, given back. Meanwhile nobody finds it: readers take that for a failure
        that passes.
        """
        try:
            if not is_wrong(path, digest):
                return False
            self._folder.mkdir(exist_ok=True)
            taken = self._folder / f"{time.time_ns()}-{digest.hex}"
            path.rename(taken)
        except FileNotFoundError:
            return False
        was_wrong = is_wrong(taken, digest)
        if not was_wrong:
            with suppress(FileExistsError):
                path.hardlink_to(taken)
            taken.unlink()
        self._trim()
        return was_wrong

    def count(self) -> int:
        """How many there are."""
        return len(self._names())

    def _trim(self) -> None:
        for name in self._names()[:-KEPT]:
            (self._folder / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self._folder.iterdir())
        return []


def is_wrong(path: Path, digest: Digest) -> bool:
    """Whether the file is not what its name says. Reads all of it."""
    with path.open("rb", buffering=0) as file:
        return fault_of(file, digest) is not None
