"""Opens both tiers of the cache on one disk: whole files for jobs, and chunks for peers.

The disk decides what the cache holds. The start-up scan finishes interrupted evictions and quarantines wrong files.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bdn.core.cache.index import CacheIndex, EvictionReason, Victim
from bdn.core.chunk import Digest
from bdn.core.events import Event
from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, remove_tree
from bdn.disk.threads import in_thread
from bdn.wire.grants import Grant
from bdn.wire.operation_schema import Tier
from node_agent.cache.cache_events import CacheEvents, dropped
from node_agent.cache.cluster_tier import ChunkFiles, ClusterTier
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.node_cache import Clock, NodeCache, UseClock
from node_agent.cache.peer_access import PeerAccess
from node_agent.cache.quarantine import Quarantine, SuspectFiles
from node_agent.cache.records import CacheFiles, Held, ManifestRecords, ScannedManifest
from node_agent.cache.space import Space
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.disk.whole_files import WholeFiles, seen
from node_agent.journal import Journal
from node_agent.settings import AgentSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheTiers:
    """``node`` holds whole files; its ``chunks`` include the cluster tier's. ``access`` authorizes peers' reads."""

    node: NodeCache
    access: PeerAccess
    suspects: SuspectFiles


async def open_tiers(
    settings: AgentSettings,
    disk: CacheDirectory,
    journal: Journal,
    *,
    on_evicted: Callable[[Tier, EvictionReason, int], None],
    verify: Callable[[str], Grant],
    on_change: Callable[[], None],
    clock: Clock,
) -> CacheTiers:
    """Read what the last run left on disk. Raises ``DiskFailedError`` if it cannot be read.

    ``on_evicted`` counts evictions; ``verify`` checks the grant that a peer sends, unless authentication is off;
    ``on_change`` is called on the event loop when chunks or files come or go.
    """
    places, writes = disk.places, disk.writes
    uses, suspects = UseClock(clock), SuspectFiles()
    index, manifests = CacheIndex(), ManifestRecords(places)

    def evicted(tier: Tier, reason: EvictionReason, victims: Sequence[Victim]) -> None:
        on_evicted(tier, reason, len(victims))
        for victim in victims:
            facts = {"tier": tier, "manifest": str(victim.manifest), "bytes": victim.size, "reason": reason}
            logger.info("evicted", extra=facts)

    # Byte threads add and remove chunks; the event loop is notified.
    tell = partial(asyncio.get_running_loop().call_soon_threadsafe, on_change)
    cluster_events = CacheEvents(tell, partial(evicted, "cluster"), journal.record)
    chunk_files = ChunkFiles(places.root / "cluster", writes)
    cluster = ClusterTier(chunk_files, lambda: space.room().budgets.cluster, uses, cluster_events)
    space = Space(settings, disk, node=index.ledger, cluster=cluster.ledger)
    chunks = HeldChunks(disk.files, index, cluster, suspects.add)
    access = PeerAccess(chunks, None if settings.auth == "off" else verify)
    events = CacheEvents(on_change, partial(evicted, "node"), journal.record)
    node = NodeCache(index, CacheFiles(disk.files, manifests), chunks, space, uses, events)

    uses.seen(await in_thread(cluster.load))
    scanner = Scanner(disk.files, manifests, chunks, suspects)
    for found in await in_thread(scanner.run):
        found.restore(index)
        await asyncio.sleep(0)
    for manifest in index.recency.oldest_first():
        uses.seen(index.recency.last_used(manifest))
    await in_thread(journal.record, scanner.decisions)
    return CacheTiers(node, access, suspects)


class Scanner:
    """Scans the cache directory once, before anything else uses it. Blocking; raises ``DiskFailedError``.

    Costs one ``stat`` per file. Content is not hashed: a file got its name after verification, and a file that changed
    since is suspected.
    """

    def __init__(self, files: WholeFiles, records: ManifestRecords, chunks: HeldChunks, suspects: SuspectFiles) -> None:
        self._files = files
        self._places = files.places
        self._suspects = suspects
        self._records = records
        self._chunks = chunks
        self.decisions: list[Event] = []  # what the scan found and did

    def run(self) -> list[ScannedManifest]:
        """Scan, remove garbage, and let held content be served. Returns the least recently used manifest first."""
        found: list[ScannedManifest] = []
        with disk_errors(self._places.root):
            manifests: dict[Digest, Manifest] = {}
            for held in self._manifests():
                manifests[held.root.digest] = held.manifest
                self._chunks.add(held)
            sizes = {digest: size for manifest in manifests.values() for digest, size in manifest.contents.items()}
            whole = self._whole_files(sizes)
            here = dict.fromkeys(self._parts(sizes, whole), False) | dict.fromkeys(whole, True)
            for content in sorted(self._files.restore(whole, manifests.values()), key=str):
                logger.info("file %s changed since it was verified; verifying before use", content)
                self._suspects.add(content)
            for digest, manifest in manifests.items():
                present = {content: here[content] for content in manifest.contents if content in here}
                found.append(ScannedManifest(digest, manifest.contents, present, self._records.last_used(digest)))
        for one in found:
            bytes_whole = sum(one.contents[content] for content, is_whole in one.present.items() if is_whole)
            facts = {"bytes_total": sum(one.contents.values()), "bytes_whole": bytes_whole}
            self.decisions.append(Event.of("found", facts, manifest=one.manifest))
        return sorted(found, key=lambda one: one.last_used)

    def _manifests(self) -> Iterator[Held]:
        """Removes folders without a root: their manifest was being written or deleted."""
        for folder in sorted(self._places.manifests.iterdir()):
            digest = _digest(folder.name)
            if digest is None or not self._places.manifest(digest).exists():
                self._remove(folder)
                continue
            held = self._records.load(digest)
            if held is not None:
                for stray in folder.glob("*.tmp"):
                    self._remove(stray)
                yield held
                continue
            self._quarantine(self._places.manifest(digest))
            self._remove(folder)
            self.decisions += dropped([digest], "its record was damaged when the agent started, and is in quarantine")

    def _whole_files(self, sizes: dict[Digest, int]) -> dict[Digest, int]:
        """Whole files, each with its times as of ``seen``."""
        whole: dict[Digest, int] = {}
        unfinished = 0
        for entry in _walk(self._places.files):
            path, digest = Path(entry.path), _digest(entry.name)
            size = sizes.get(digest) if digest else None
            if entry.name.startswith("."):
                path.unlink()  # a small file in progress
                unfinished += 1
            elif size is None or digest is None:
                self._remove(path)  # no manifest names it: an eviction was interrupted
            elif (found := entry.stat(follow_symlinks=False)).st_size != size:
                self._quarantine(path)
                reason = f"the file had {found.st_size} bytes instead of {size}; moved to quarantine"
                self.decisions.append(Event.of("damaged", {"tier": "node", "reason": reason}, digest=digest))
            else:
                whole[digest] = seen(found)
        if unfinished:
            logger.info("removed %s small files that were being written when the agent ended", unfinished)
        return whole

    def _parts(self, sizes: dict[Digest, int], whole: Container[Digest]) -> set[Digest]:
        begun: set[Digest] = set()
        for entry in _walk(self._places.filling):
            stem, _, kind = entry.name.partition(".")
            digest = _digest(stem)
            if digest is None or digest not in sizes or digest in whole:
                self._remove(Path(entry.path))
            elif kind == "part":
                begun.add(digest)
            elif not self._places.part(digest).exists():
                self._remove(Path(entry.path))
        return begun

    def _remove(self, path: Path) -> None:
        remove_tree(path)
        logger.info("removed %s: no manifest names it", path)

    def _quarantine(self, path: Path) -> None:
        place = Quarantine(self._places.quarantine).take(path)
        logger.warning("moved %s to %s: its content does not match its name", path, place)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield entry


def _digest(name: str) -> Digest | None:
    try:
        return Digest(name)
    except ValueError:
        return None
