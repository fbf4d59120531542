"""A node's disk space: what is held, what is promised to running fills, and what may still be promised."""

from __future__ import annotations

from bdn.core.digest import Digest


class SpaceLedger:
    """Bytes per content, each content once: *reserved* before its first byte, *committed* when it is whole.

    Keeps running sums; every method is constant time. The budget is not ours: it changes with the disk, so callers pass it.
    """

    def __init__(self) -> None:
        self._reserved: dict[Digest, int] = {}
        self._committed: dict[Digest, int] = {}
        self.reserved_bytes = 0
        self.committed_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Committed and reserved together: what must never pass the budget."""
        return self.reserved_bytes + self.committed_bytes

    @property
    def reserved_count(self) -> int:
        """How many contents are promised and not whole yet."""
        return len(self._reserved)

    @property
    def count(self) -> int:
        """How many contents are counted."""
        return len(self._reserved) + len(self._committed)

    def size_of(self, digest: Digest) -> int | None:
        """The bytes counted for this content, or None when it is not counted."""
        return self._committed.get(digest, self._reserved.get(digest))

    def is_committed(self, digest: Digest) -> bool:
        """Whether the content is whole on this disk."""
        return digest in self._committed

    def reserve(self, digest: Digest, size: int) -> None:
        """Set space aside for content that is not counted yet."""
        if self.size_of(digest) is not None:
            msg = f"{digest} is counted already"
            raise ValueError(msg)
        self._reserved[digest] = size
        self.reserved_bytes += size

    def commit(self, digest: Digest) -> None:
        """A fill finished: its reservation becomes committed content. Committing twice changes nothing."""
        if digest in self._committed:
            return
        size = self._reserved.pop(digest)
        self._committed[digest] = size
        self.reserved_bytes -= size
        self.committed_bytes += size

    def release(self, digest: Digest) -> int:
        """The content left the disk, whole or partial; returns the bytes that were counted, 0 when none were."""
        if digest in self._committed:
            size = self._committed.pop(digest)
            self.committed_bytes -= size
        else:
            size = self._reserved.pop(digest, 0)
            self.reserved_bytes -= size
        return size
