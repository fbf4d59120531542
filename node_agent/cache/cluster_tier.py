"""The cluster tier of one agent: the chunks that it holds for its peers, within a budget of their own.

On disk: ``cluster/chunks/<manifest>/<chunk>``, whole chunks in the folder of the manifest for which they were read. The
folders are the only record, and a folder's modification time is the manifest's last use. No other record can disagree
with the disk, and a kill at any point leaves nothing to repair except partial files in ``incoming``.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from bdn.core.cache.digest_table import DigestTable
from bdn.core.cache.index import EvictionReason, SpaceLedger, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.core.events import Event
from bdn.disk.direct import DirectWrites, write_read_only
from bdn.disk.durable import disk_errors, make_folder, open_existing, remove_tree
from node_agent.cache.cache_events import Account, CacheEvents, kept, over_budget

logger = logging.getLogger(__name__)
IN_USE_SECONDS: Final = 60.0  # after its last use; until then peers are likely to request more of a manifest
_TOUCH_SECONDS: Final = 30.0  # between two writes of a manifest's last use to disk: the LRU order that a kill can lose


@dataclass(frozen=True)
class FoundChunks:
    manifest: Digest
    chunks: dict[Digest, int]
    last_used: float


class ChunkFiles:
    """Files below ``root``. Methods block, raise ``DiskFailedError``, and may run in several threads at once."""

    def __init__(self, root: Path, writes: DirectWrites) -> None:
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._writes = writes

    def scan(self) -> list[FoundChunks]:
        """Make the folders, remove partial files that a kill left, and list the chunks on disk."""
        with disk_errors(self._chunks):
            for folder in (self._chunks, self._incoming):
                make_folder(folder, 0o700)
            for path in self._incoming.iterdir():
                path.unlink()
            found = [self._look(folder) for folder in self._chunks.iterdir()]
        return [one for one in found if one is not None]

    def _look(self, folder: Path) -> FoundChunks | None:
        try:
            manifest = Digest(folder.name)
            with os.scandir(folder) as entries:
                chunks = {Digest(entry.name): entry.stat(follow_symlinks=False).st_size for entry in entries}
        except ValueError:  # not a folder or chunk of ours
            remove_tree(folder)
            return None
        if not chunks:
            folder.rmdir()
            return None
        return FoundChunks(manifest, chunks, folder.stat().st_mtime)

    def write(self, chunk: Digest, content: memoryview) -> None:
        """Write a verified chunk aside, durable and read-only. Then call ``appear``; after a failure, ``discard``."""
        aside = self._incoming / chunk.hex
        with disk_errors(aside):
            aside.unlink(missing_ok=True)  # an earlier ``discard`` may have failed
            write_read_only(aside, content, self._writes)

    def discard(self, chunk: Digest) -> None:
        with suppress(OSError):  # the failure before says more
            (self._incoming / chunk.hex).unlink()

    def appear(self, manifest: Digest, chunk: Digest) -> None:
        """Move a written chunk into the manifest's folder. Do not call during ``remove_folder``.

        The name is not synced: a power cut may undo it, which does no harm.
        """
        path = self.path(manifest, chunk)
        with disk_errors(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            (self._incoming / chunk.hex).rename(path)

    def open(self, manifest: Digest, chunk: Digest) -> BinaryIO | None:
        return open_existing(self.path(manifest, chunk))

    def touch(self, manifest: Digest, now: float) -> None:
        folder = self._chunks / manifest.hex
        with disk_errors(folder), suppress(FileNotFoundError):
            os.utime(folder, ns=(int(now * 1e9), int(now * 1e9)))

    def remove(self, manifest: Digest, chunk: Digest) -> None:
        path = self.path(manifest, chunk)
        with disk_errors(path):
            path.unlink(missing_ok=True)

    def remove_folder(self, manifest: Digest) -> None:
        """Remove the folder if it is empty; otherwise the next start scans it."""
        with suppress(OSError):
            (self._chunks / manifest.hex).rmdir()

    def path(self, manifest: Digest, chunk: Digest) -> Path:
        return self._chunks / manifest.hex / chunk.hex


@dataclass(slots=True)
class _Share:
    """The whole chunks of a manifest. ``noted`` is the last use that is also on disk."""

    number: int
    last_used: float
    noted: float = 0.0
    size: int = 0  # bytes
    chunks: DigestTable = field(default_factory=DigestTable)


@dataclass(frozen=True)
class ClusterTier:
    """Chunks by the manifest for which they were read. Manifests are evicted whole, least recently used first.

    A chunk of several manifests is held for the first of them, and is evicted with it. Until then it is also served to
    peers that read another one.

    One lock is held while the state changes and victims are deleted. So no call gets room that is still full. ``open``
    does not acquire the lock: a peer never waits for a deletion, and an open file stays readable after its eviction.
    A chunk is counted until its file is deleted, so the counts are right after a deletion that failed half-way.

    All methods block, and may be called from any thread. ``budget`` is the limit in bytes now; ``clock`` never goes
    back. ``events`` are called in the caller's thread. Callers only read the ``ledger``.
    """

    files: ChunkFiles
    budget: Callable[[], int]
    clock: Callable[[], float]
    events: CacheEvents
    ledger: SpaceLedger = field(default_factory=lambda: SpaceLedger(DigestTable(width=4)))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _shares: dict[Digest, _Share] = field(default_factory=dict)  # by manifest
    _owners: DigestTable = field(default_factory=lambda: DigestTable(width=4))  # whole chunk -> number of its share
    _manifests: dict[int, Digest] = field(default_factory=dict)  # by number; numbers are not reused
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def load(self) -> float:
        """Count what is on disk. Call before any other method. Returns the time of the last use."""
        for found in sorted(self.files.scan(), key=lambda one: one.last_used, reverse=True):
            for chunk, size in found.chunks.items():
                if self.holds(chunk):  # a wrong chunk that ``lose`` could not remove, and the one read after it
                    self.files.remove(found.manifest, chunk)
                else:
                    self.ledger.reserve(chunk, size)
                    self._hold(found.manifest, chunk, found.last_used)
        return max((share.last_used for share in self._shares.values()), default=0.0)

    # --- reading ---

    def open(self, chunk: Digest) -> BinaryIO | None:
        """The chunk's file, which the caller closes, or None. Marks the chunk's manifest as used."""
        manifest = self.manifest_of(chunk)
        if manifest is None:
            return None
        file = self.files.open(manifest, chunk)
        if file is not None:
            self._touch(manifest)
            return file
        with self._lock:  # evicted meanwhile; or removed by another program, and the disk wins
            if self.manifest_of(chunk) == manifest:
                logger.warning("chunk %s vanished from the cache directory; dropping it from the index", chunk)
                self._remove(chunk)
        return None

    def holds(self, chunk: Digest) -> bool:
        """Whether the tier counts the chunk as whole. The file may have been removed from disk since."""
        return self.ledger.is_committed(chunk)

    def manifest_of(self, chunk: Digest) -> Digest | None:
        """The manifest for which the chunk was read; None if the chunk is not here."""
        return self._manifests.get(self._owners.get(chunk, -1))

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The manifest's chunks. Does not mark them as used."""
        with self._lock:
            share = self._shares.get(manifest)
            return frozenset(share.chunks if share else ())

    def held(self) -> dict[Digest, tuple[int, float]]:
        """Bytes and last use by manifest, least recently used first."""
        with self._lock:
            shares = [(manifest, self._shares[manifest]) for manifest in self._oldest_first()]
            return {manifest: (share.size, share.last_used) for manifest, share in shares}

    # --- taking in ---

    def bring(self, manifest: Digest, chunk: Digest, buffer: memoryview, read: Callable[[memoryview], object]) -> bool:
        """Make room for a chunk, read it into ``buffer`` (exactly the chunk's size), and hold it.

        Returns:
            False if the chunk was not read: it is here, or another call is reading it.

        Raises:
            CacheTooSmallError, CacheFullError: nothing was read.
            BdnError: what ``read`` raises, or DISK_FAILED. The room is free again.
        """
        with self._lock:
            if self.ledger.size_of(chunk) is not None:
                return False
            self._make_room(manifest, len(buffer))
            self.ledger.reserve(chunk, len(buffer))
        try:
            read(buffer)
            self.files.write(chunk, buffer)
            with self._lock:
                self.files.appear(manifest, chunk)
                is_new = manifest not in self._shares
                self._hold(manifest, chunk, self.clock())
        except BaseException:
            self.files.discard(chunk)
            with self._lock:
                self.ledger.release(chunk)
            raise
        if is_new:
            self.events.changed()
        return True

    def keep(self, manifest: Digest, chunk: Digest, content: memoryview) -> bool:
        """Hold a verified chunk that a fill of this node read. Returns False on failure; the fill continues without."""
        try:
            self.bring(manifest, chunk, content, lambda _: None)
        except (CacheFullError, CacheTooSmallError):
            return False
        except BdnError as error:
            logger.warning("cannot store chunk %s for the cluster: %s; the fill continues without", chunk, error)
            return False
        return True

    # --- taking out ---

    def lose(self, chunk: Digest) -> None:
        """Stop holding a chunk whose bytes do not match its digest, even if its file cannot be removed."""
        with self._lock:
            if chunk in self._owners:
                try:
                    self._remove(chunk)
                except BdnError:
                    self._forget(chunk)
                    raise

    def drop(self, is_elsewhere: Callable[[Digest], bool]) -> int:
        """Remove chunks that a whole file of this node can serve as well. Returns how many."""
        with self._lock:
            covered = [chunk for chunk in self._owners if is_elsewhere(chunk)]
            for chunk in covered:
                self._remove(chunk)
        return len(covered)

    def plan(self, manifests: Iterable[Digest] | None, size: int | None) -> tuple[Victim, ...]:
        with self._lock:
            return self._choose(manifests, size)

    def evict(
        self, manifests: Iterable[Digest] | None, size: int | None, reason: EvictionReason, account: Account
    ) -> tuple[Victim, ...]:
        """Evict these manifests (None: all, least recently used first) until ``size`` bytes, if given, are freed.

        ``account`` gives the reason for each victim.

        Raises ``DiskFailedError``: chunks that could not be deleted are still held.
        """
        with self._lock:
            victims = self._choose(manifests, size)
            self._delete(victims, reason, list(map(account, victims)))
        return victims

    def trim(self) -> None:
        """Evict what exceeds the budget, which shrinks when the disk fills or the operator lowers it."""
        held, budget = self.ledger.used_bytes, self.budget()
        if held > budget:
            self.evict(None, held - budget, "trim", over_budget("cluster", held, budget, budget))

    # --- inside; callers hold the lock, unless a docstring says otherwise ---

    def _oldest_first(self) -> list[Digest]:
        return sorted(self._shares, key=lambda manifest: self._shares[manifest].last_used)

    def _choose(self, manifests: Iterable[Digest] | None, size: int | None) -> tuple[Victim, ...]:
        victims: list[Victim] = []
        freed = 0
        for manifest in self._oldest_first() if manifests is None else dict.fromkeys(manifests):
            if size is not None and freed >= size:
                break
            if (share := self._shares.get(manifest)) is not None:
                victims.append(Victim(manifest, (), share.size, last_used=share.last_used))
                freed += share.size
        return tuple(victims)

    def _make_room(self, newcomer: Digest, size: int) -> None:
        """Evict manifests that are not in use, except the newcomer's, until ``size`` bytes fit."""
        budget, used, now = self.budget(), self.ledger.used_bytes, self.clock()
        if size > budget:
            raise CacheTooSmallError(size, budget)
        over = used + size - budget
        if over <= 0:
            return
        idle = [
            manifest
            for manifest in self._oldest_first()
            if manifest != newcomer and now - self._shares[manifest].last_used >= IN_USE_SECONDS
        ]
        victims = self._choose(idle, over)
        freed = sum(victim.size for victim in victims)
        if freed < over:
            in_use = self.ledger.committed_bytes - freed
            raise CacheFullError(size, max(0, budget - used), in_use, budget)
        self._delete(victims, "lru", [_made_room(victim, newcomer) for victim in victims])

    def _hold(self, manifest: Digest, chunk: Digest, now: float) -> None:
        share = self._shares.get(manifest)
        if share is None:
            share = self._shares[manifest] = _Share(next(self._numbers), now)
            self._manifests[share.number] = manifest
        self.ledger.commit(chunk)
        share.last_used = now
        share.size += self.ledger.size_of(chunk) or 0
        share.chunks[chunk] = 0
        self._owners[chunk] = share.number

    def _touch(self, manifest: Digest) -> None:
        """Without the lock: of two concurrent uses either may win."""
        share = self._shares.get(manifest)
        if share is None:
            return  # evicted meanwhile
        share.last_used = now = self.clock()
        if now - share.noted >= _TOUCH_SECONDS:
            share.noted = now
            with suppress(BdnError):  # loses only the LRU order after the next restart
                self.files.touch(manifest, now)

    def _remove(self, chunk: Digest) -> None:
        self.files.remove(self._manifests[self._owners[chunk]], chunk)
        self._forget(chunk)

    def _forget(self, chunk: Digest) -> None:
        number = self._owners.pop(chunk)
        manifest = self._manifests[number]
        share = self._shares[manifest]
        del share.chunks[chunk]
        share.size -= self.ledger.release(chunk)
        if not share.chunks:
            del self._shares[manifest], self._manifests[number]
            self.files.remove_folder(manifest)

    def _delete(self, victims: Sequence[Victim], reason: EvictionReason, decisions: Sequence[Event]) -> None:
        self.events.decided(decisions)
        count = 0
        try:
            for victim in victims:
                for chunk in tuple(self._shares[victim.manifest].chunks):
                    self._remove(chunk)
                count += 1
        except BdnError as error:
            self.events.decided(kept((victim.manifest for victim in victims[count:]), error))
            raise
        finally:
            if count:
                self.events.evicted(reason, victims[:count])
                self.events.changed()


def _made_room(victim: Victim, newcomer: Digest) -> Event:
    return Event.of(
        "made_room", {"tier": "cluster", "bytes": victim.size, "newcomer": str(newcomer)}, manifest=victim.manifest
    )
