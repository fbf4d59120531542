"""One chunk on its way into a buffer, from one source after the other; hashed as it comes."""

from __future__ import annotations

from collections import Counter

from blake3 import blake3

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import OnBytes
from bdn.wire.eviction_schema import Tier


class Gathering:
    """What has come of a chunk. It goes on where a source left off, and is believed only when the whole is right."""

    def __init__(self, digest: Digest, buffer: memoryview) -> None:
        self.digest = digest
        self.buffer = buffer
        self.begin()

    def begin(self) -> None:
        """Nothing of what came so far is to be used."""
        self.done = 0
        self.came: Counter[Tier] = Counter()
        self.sources: list[str] = []
        self._hasher = blake3()

    @property
    def missing(self) -> int:
        """Bytes that have not come."""
        return len(self.buffer) - self.done

    def taking(self, tier: Tier, source: str) -> OnBytes:
        """To be shown the bytes that this source brings."""

        def take(piece: memoryview) -> None:
            self._hasher.update(piece)
            if source not in self.sources:
                self.sources.append(source)
            self.came[tier] += len(piece)
            self.done += len(piece)

        return take

    def check(self) -> None:
        """Raises ``ChecksumMismatchError`` when the whole is not the chunk."""
        actual = Digest(self._hasher.hexdigest())
        if actual != self.digest:
            raise ChecksumMismatchError(f"chunk {self.digest}", str(self.digest), str(actual))
