"""Least recently used, in whole manifests, kept by us: never the file system's atime, which mount options turn off."""

from __future__ import annotations

from collections.abc import Iterator

from bdn.core.digest import Digest


class RecencyOrder:
    """Manifests by last use. A use is a time in seconds since the epoch, so that the order survives a restart.

    A manifest's files are touched together; otherwise LRU would evict half a model.
    """

    def __init__(self) -> None:
        self._last_used: dict[Digest, float] = {}

    def touch(self, manifest: Digest, now: float) -> None:
        """Used at ``now``. A clock that went back never makes a manifest older than it was."""
        self._last_used[manifest] = max(now, self._last_used.pop(manifest, now))

    def forget(self, manifest: Digest) -> None:
        """No longer held."""
        self._last_used.pop(manifest, None)

    def last_used(self, manifest: Digest) -> float:
        """When it was used last; ``KeyError`` when it is not held."""
        return self._last_used[manifest]

    def oldest_first(self) -> Iterator[Digest]:
        """All of them, least recently used first; equal times in the order of their touches."""
        return iter(sorted(self._last_used, key=self._last_used.__getitem__))
