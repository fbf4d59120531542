"""What is lacking before content can be let in: bytes, and files where the file system has few inodes left."""

from __future__ import annotations

from collections.abc import Mapping

from bdn.core.cache.ledger import SpaceLedger
from bdn.core.digest import Digest
from bdn.core.errors import CacheFullError


class Shortfall:
    """Shrinks with every victim. Content that needs no bytes lacks none, even in a cache that is over its budget."""

    def __init__(
        self, ledger: SpaceLedger, absent: Mapping[Digest, int], *, budget: int, free_files: int | None
    ) -> None:
        """``absent`` is what is to be let in, with sizes; ``free_files`` how many files more there may be, None for any number."""
        self.needed = sum(absent.values())
        self._free = max(0, budget - ledger.used_bytes)
        self._budget = budget
        self._files, self._free_files = len(absent), free_files
        self._over = ledger.used_bytes + self.needed - budget if self.needed else 0
        self._files_over = 0 if free_files is None else self._files - free_files

    @property
    def is_met(self) -> bool:
        """Whether nothing is lacking any more."""
        return self._over <= 0 and self._files_over <= 0

    def free(self, size: int, files: int) -> None:
        """So much goes."""
        self._over -= size
        self._files_over -= files

    def error(self, leased_bytes: int) -> CacheFullError:
        """Why it is not let in."""
        files = (self._files, self._free_files) if self._over <= 0 else (None, None)
        return CacheFullError(self.needed, self._free, leased_bytes, self._budget, *files)
