"""Manifests that were read lately: a job that comes again need not wait until a million paths are parsed again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from bdn.core.digest import Digest
from bdn.core.manifest import Manifest

FILES_KEPT: Final = 200_000  # about 80 MB; a larger manifest is parsed each time


class RecentManifests:
    """The last used ones, as many as have ``limit`` files together. Shared by threads.

    It knows nothing of the disk: whoever asks makes sure that the manifest's record is still there.
    """

    def __init__(self, limit: int = FILES_KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._manifests: OrderedDict[Digest, Manifest] = OrderedDict()
        self._files = 0

    def get(self, digest: Digest) -> Manifest | None:
        """The manifest, if it is here; it is now the one used last."""
        with self._lock:
            found = self._manifests.get(digest)
            if found is not None:
                self._manifests.move_to_end(digest)
            return found

    def put(self, manifest: Manifest) -> None:
        """Keep it, and let go of the oldest while there are too many files."""
        with self._lock:
            self._drop(manifest.digest)
            self._manifests[manifest.digest] = manifest
            self._files += len(manifest.files)
            while self._files > self._limit:
                self._drop(next(iter(self._manifests)))

    def forget(self, digest: Digest) -> None:
        """It is evicted."""
        with self._lock:
            self._drop(digest)

    def _drop(self, digest: Digest) -> None:
        gone = self._manifests.pop(digest, None)
        if gone is not None:
            self._files -= len(gone.files)
