"""Nothing that a reader delivers is believed before its name has been computed again."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import PieceReader


@dataclass(frozen=True)
class VerifyingReader:
    """Wraps a reader; a chunk whose bytes do not hash to its name is CHECKSUM_MISMATCH.

    Hashes each piece as it comes. To hash 8 MiB when all of them are there costs half as much again for the whole of a
    transfer, because by then the first ones have left the processor's cache.
    """

    inner: PieceReader

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill ``buffer`` with the chunk, or raise."""
        hasher = blake3()
        self.inner.read_into(digest, buffer, hasher.update)
        actual = Digest(hasher.hexdigest())
        if actual != digest:
            raise ChecksumMismatchError(f"chunk {digest}", str(digest), str(actual))
