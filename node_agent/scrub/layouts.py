"""Which chunks a held file should have, from what this disk says about it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest
from bdn.core.store.layout import FileLayout
from bdn.wire.layout_form import Layout
from node_agent.cache.records import ManifestRecords
from node_agent.scrub.subject import plain


@dataclass(frozen=True)
class KnownLayouts:
    """The layouts beside held manifests, of which the last one that was needed is kept in memory. Blocking; any thread."""

    records: ManifestRecords
    _last: dict[Digest, Layout | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, content: Digest, size: int, manifests: Collection[Digest]) -> FileLayout | None:
        """The layout of a content that these manifests name; None when no record here tells its chunks."""
        if size <= CHUNK_SIZE:
            return plain(content, size)
        for manifest in manifests:
            layout = self._layout(manifest)
            if layout is not None and (found := layout.files.get(content)) is not None:
                return found
        return None

    def path_of(self, manifest: Digest, content: Digest) -> str | None:
        """Where a manifest has this content, in one place of perhaps several."""
        held = self.records.load(manifest)
        return next((entry.path for entry in held.files if entry.digest == content), None) if held else None

    def _layout(self, manifest: Digest) -> Layout | None:
        with self._lock:
            if manifest not in self._last:
                self._last.clear()
                self._last[manifest] = self.records.load_layout(manifest)
            return self._last[manifest]
