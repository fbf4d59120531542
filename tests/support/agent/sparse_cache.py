"""A cache that holds more than this disk does: whole files without a single block, under the names of real ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.manifest import FileEntry, Manifest
from bdn.core.store import FileLayout
from bdn.wire.layout_form import Layout
from node_agent.cache.records import Held, ManifestRecords
from node_agent.disk.places import Places


def hold_sparse(cache: Path, sizes: dict[str, int]) -> Manifest:
    """Put files of zeros there, as an agent would find them that had filled them; returns their manifest.

    Sizes are whole chunks and differ, since equal content would be one file.
    """
    places = Places(cache)
    places.make()
    zeros = digest_of(bytes(CHUNK_SIZE))
    layouts = {path: FileLayout.of(size, (zeros,) * (size // CHUNK_SIZE)) for path, size in sizes.items()}
    for content in layouts.values():
        file = places.file(content.digest)
        file.touch(0o444)
        os.truncate(file, content.size)
    manifest = Manifest.of(FileEntry(path, content.size, content.digest) for path, content in layouts.items())
    layout = Layout(manifest.digest, None, {content.digest: content for content in layouts.values()})
    ManifestRecords(places).save(Held(manifest, layout), time.time())
    return manifest
