"""Nothing that a reader delivers is believed before its name has been computed again."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import ChunkReader


@dataclass(frozen=True)
class VerifyingReader:
    """Wraps a reader; a chunk whose bytes do not hash to its name is CHECKSUM_MISMATCH. Hashes in place, while hot."""

    inner: ChunkReader

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill ``buffer`` with the chunk, or raise."""
        self.inner.read_into(digest, buffer)
        actual = digest_of(buffer)
        if actual != digest:
            raise ChecksumMismatchError(f"chunk {digest}", str(digest), str(actual))
