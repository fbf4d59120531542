"""Content that stands in a cache directory without an agent that put it there, and a cluster tier without an agent around it."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from bdn.core.cache.index import Steps
from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, digest_of
from bdn.core.layout import Manifest
from bdn.disk.direct import DirectWrites
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.cluster_tier import ChunkFiles, ClusterTier, FoundChunks
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles, seen
from tests.support.content.layouts import held_of, whole

_Result = TypeVar("_Result")


def cached(root: Path, files: Mapping[str, bytes]) -> tuple[Places, Manifest]:
    """A directory that holds this tree, whole."""
    places = Places(root)
    places.make()
    return places, put(places, files)


def put(places: Places, files: Mapping[str, bytes], *, used: float = 1000.0) -> Manifest:
    """Another tree in the same directory, used at that time."""
    held = held_of({path: whole(content) for path, content in files.items()})
    ManifestRecords(places).save(held, used)
    for entry in held.manifest.files:
        path = places.file(entry.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(files[entry.path])
            path.chmod(0o444)
    return held.manifest


def whole_files(places: Places) -> WholeFiles:
    """What stands there, believed to be right."""
    files = WholeFiles(places)
    files.restore({Digest(path.name): seen(path.stat()) for path in places.files.glob("??/*")}, ())
    return files


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
    held = held_of(layouts)
    ManifestRecords(places).save(held, time.time())
    return held.manifest


def at_once(steps: Steps[_Result]) -> _Result:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _Result = ended.value
            return result


NO_EVENTS = CacheEvents(lambda: None, lambda _reason, _victims: None)


def a_tier(
    root: Path, budget: int = 0, clock: Callable[[], float] = lambda: 1000.0, events: CacheEvents = NO_EVENTS
) -> ClusterTier:
    """The tier of this directory, loaded."""
    tier = ClusterTier(ChunkFiles(root / "cluster", DirectWrites()), lambda: budget, clock, events)
    tier.load()
    return tier


def a_tier_of_chunks(manifest: Digest, sizes: dict[Digest, int]) -> ClusterTier:
    """The tier of a directory that holds these chunks, without the directory."""
    found = [[FoundChunks(manifest, sizes, 1000.0)]]
    tier = ClusterTier(cast(Any, SimpleNamespace(scan=found.pop)), lambda: 0, lambda: 1000.0, NO_EVENTS)
    tier.load()
    return tier
