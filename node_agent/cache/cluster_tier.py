"""The cluster tier of one agent: the chunks that it holds for its peers, within a budget of their own.

On disk: ``cluster/chunks/<manifest>/<chunk>``, whole chunks under every manifest that names them. The folders are the
only record: a folder holds its manifest's chunks, a chunk of two manifests is two links to one file, and a folder's
modification time is the manifest's last use. No other record can disagree with the disk, and a kill at any point leaves
nothing to repair except partial files in ``incoming``.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from bdn.core.cache.index import ChunkIndex, EvictionPlan, EvictionReason, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.core.events import Event
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import disk_errors, make_folder, open_existing, remove_tree
from node_agent.cache.cache_events import Account, CacheEvents, kept, over_budget

logger = logging.getLogger(__name__)
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
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot

    def scan(self) -> list[FoundChunks]:
        """Make the folders, remove partial files that a kill left, and list the chunks on disk."""
        with disk_errors(self._chunks):
            for folder in (self._chunks, self._incoming):
                make_folder(folder, 0o700)
            for path in self._incoming.iterdir():
                path.unlink()
            found = [self._look(folder) for folder in self._chunks.iterdir()]
        return [one for one in found if one is not None]

    def look_at(self, manifest: Digest) -> FoundChunks | None:
        """The folder's chunks now. None if it is empty or absent."""
        with disk_errors(self._chunks / manifest.hex):
            return self._look(self._chunks / manifest.hex)

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

    def write(self, content: memoryview) -> Path:
        """Write a verified chunk, durable and read-only. The caller names it with ``appear``."""
        aside = self._incoming / str(next(self._numbers))
        with disk_errors(aside):
            try:
                file = DirectFile(aside, self._writes)
                try:
                    file.open()
                    file.write(content, 0)
                    os.fchmod(file.descriptor, 0o444)
                    os.fdatasync(file.descriptor)
                finally:
                    file.close()
            except OSError:
                with suppress(OSError):  # the first failure says more
                    aside.unlink()
                raise
        return aside

    def appear(self, aside: Path, chunk: Digest, manifests: Iterable[Digest]) -> None:
        """Link a written chunk into the folders of these manifests, or remove it if there are none.

        The names are not synced: a power cut may undo them, which does no harm. Do not call while one of the folders is
        being removed: the removal would delete the chunk, or the folder would be missing.
        """
        with disk_errors(aside):
            try:
                for manifest in manifests:
                    self._link(aside, manifest, chunk)
            finally:
                aside.unlink()

    def link(self, chunk: Digest, holder: Digest, manifest: Digest) -> None:
        """Link a chunk from the folder of ``holder`` into another manifest's folder."""
        with disk_errors(self.path(manifest, chunk)):
            self._link(self.path(holder, chunk), manifest, chunk)

    def open(self, manifest: Digest, chunk: Digest) -> BinaryIO | None:
        return open_existing(self.path(manifest, chunk))

    def has(self, manifest: Digest, chunk: Digest) -> bool:
        path = self.path(manifest, chunk)
        with disk_errors(path):
            return path.exists()

    def touch(self, manifest: Digest, now: float) -> None:
        folder = self._chunks / manifest.hex
        with disk_errors(folder), suppress(FileNotFoundError):
            os.utime(folder, ns=(int(now * 1e9), int(now * 1e9)))

    def remove(self, manifests: Iterable[Digest], chunk: Digest) -> None:
        for manifest in manifests:
            path = self.path(manifest, chunk)
            with disk_errors(path):
                path.unlink(missing_ok=True)

    def remove_all(self, manifest: Digest) -> None:
        with disk_errors(self._chunks / manifest.hex):
            remove_tree(self._chunks / manifest.hex)

    def path(self, manifest: Digest, chunk: Digest) -> Path:
        return self._chunks / manifest.hex / chunk.hex

    def _link(self, file: Path, manifest: Digest, chunk: Digest) -> None:
        path = self.path(manifest, chunk)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.link(file, path)


@dataclass(frozen=True)
class ClusterTier:
    """The rules of ``ChunkIndex``, carried out on disk. All methods block, and may be called from any thread.

    One lock is held while the index changes and victims are deleted. So no call gets room that is still full, or adds a
    chunk that is about to be deleted. ``open`` does not acquire the lock: a peer never waits for a deletion, and an
    open file stays readable after its eviction. Files that a failing disk does not delete are counted again.

    ``budget`` is the limit in bytes now. ``events`` are called in the caller's thread.
    """

    files: ChunkFiles
    index: ChunkIndex
    budget: Callable[[], int]
    clock: Callable[[], float]
    events: CacheEvents
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _used: dict[Digest, float] = field(default_factory=dict)  # uses not yet applied to the index
    _noted: dict[Digest, float] = field(default_factory=dict)  # last uses already written to disk

    def load(self) -> None:
        """Count what is on disk. Call before any other method."""
        for found in sorted(self.files.scan(), key=lambda one: one.last_used):
            self.index.restore(found.manifest, found.chunks, last_used=found.last_used)

    # --- reading ---

    def open(self, chunk: Digest) -> BinaryIO | None:
        """The chunk's file, which the caller closes, or None. Marks the chunk's manifests as used."""
        names = self.index.named_by(chunk)
        for manifest in names:
            file = self.files.open(manifest, chunk)
            if file is not None:
                for name in names:
                    self._touch(name)
                return file
        if self.holds(chunk):
            self._check(chunk)
        return None

    def holds(self, chunk: Digest) -> bool:
        """Whether the index counts the chunk as whole. The file may have been removed from disk since."""
        return self.index.ledger.is_committed(chunk)

    def manifests(self) -> tuple[Digest, ...]:
        """Manifests with at least one chunk here or being read."""
        with self._lock:
            return self.index.manifests()

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The manifest's whole chunks. Does not mark them as used."""
        with self._lock:
            return self.index.chunks_of(manifest)

    # --- taking in ---

    def bring(self, manifest: Digest, chunk: Digest, buffer: memoryview, read: Callable[[memoryview], object]) -> bool:
        """Make room for a chunk, read it into ``buffer`` (exactly the chunk's size), and hold it.

        Returns:
            False if the chunk was not read: it is here, or another call is reading it. The manifest now names it, too.

        Raises:
            CacheTooSmallError, CacheFullError: nothing was read.
            BdnError: what ``read`` raises, or DISK_FAILED. The room is free again.
        """
        with self._lock:
            self._hear_of_uses()
            is_new, budget = not self.index.holds(manifest), self.budget()
            admission = self.index.admit(manifest, chunk, len(buffer), now=self.clock(), budget=budget)
            if not admission.missing:
                self._link(chunk, manifest)
                return False
            decisions = [_made_room(victim, manifest) for victim in admission.victims]
            try:
                self._delete(admission.victims, "lru", decisions)
            except BaseException:
                self.index.lose(chunk)
                raise
        try:
            read(buffer)
            aside = self.files.write(buffer)
            with self._lock:  # meanwhile more manifests may name the chunk, and some or all may have been evicted
                self.files.appear(aside, chunk, self.index.named_by(chunk))
                self.index.commit(chunk)
        except BaseException:
            self.lose(chunk)
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
        """Stop holding a chunk: its read failed, or its bytes do not match its digest."""
        with self._lock:
            self.files.remove(self.index.lose(chunk), chunk)

    def drop(self, is_elsewhere: Callable[[Digest], bool]) -> int:
        """Remove chunks that a whole file of this node can serve as well. Returns how many."""
        with self._lock:
            covered = [chunk for chunk in self.index.committed() if is_elsewhere(chunk)]
            for chunk in covered:
                self.files.remove(self.index.named_by(chunk), chunk)  # before ``lose``: a failed removal stays counted
                self.index.lose(chunk)
        return len(covered)

    def evict(
        self, plan: Callable[[ChunkIndex], EvictionPlan], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Carry out the plan made from the index under the lock; ``account`` gives the reason for each victim.

        Raises ``DiskFailedError``: victims that could not be deleted are still held.
        """
        with self._lock:
            self._hear_of_uses()
            decided = plan(self.index)
            self.index.evict(decided)
            self._delete(decided.victims, reason, list(map(account, decided.victims)))
        return decided

    def plan(self, plan: Callable[[ChunkIndex], EvictionPlan]) -> EvictionPlan:
        with self._lock:
            self._hear_of_uses()
            return plan(self.index)

    def trim(self) -> None:
        """Evict what exceeds the budget, which shrinks when the disk fills or the operator lowers it."""
        held, budget = self.index.ledger.used_bytes, self.budget()
        if held > budget:
            account = over_budget("cluster", held, budget, budget)
            self.evict(lambda index: index.plan_lru(held - budget), "trim", account)

    # --- figures ---

    def held(self) -> dict[Digest, tuple[int, float]]:
        """Bytes and last use by manifest, least recently used first."""
        with self._lock:
            self._hear_of_uses()
            index = self.index
            return {
                manifest: (index.size_of(manifest), index.recency.last_used(manifest)) for manifest in index.manifests()
            }

    # --- inside; callers hold the lock, unless a docstring says otherwise ---

    def _touch(self, manifest: Digest) -> None:
        """Without the lock: storing into a dictionary is atomic under the GIL."""
        now = self.clock()
        self._used[manifest] = now
        if now - self._noted.get(manifest, 0) >= _TOUCH_SECONDS:
            self._noted[manifest] = now
            with suppress(BdnError):  # loses only the LRU order after the next restart
                self.files.touch(manifest, now)

    def _hear_of_uses(self) -> None:
        while self._used:
            manifest, now = self._used.popitem()
            if self.index.holds(manifest):
                self.index.recency.touch(manifest, now)
            else:
                self._noted.pop(manifest, None)

    def _link(self, chunk: Digest, manifest: Digest) -> None:
        """Link a whole chunk into the manifest's folder, so that it survives the eviction of other manifests."""
        if not self.holds(chunk):
            return  # still being read: the reading call links it for all manifests
        names = self.index.named_by(chunk)
        source = next((name for name in names if name != manifest and self.files.has(name, chunk)), None)
        if source is not None:
            self.files.link(chunk, source, manifest)

    def _check(self, chunk: Digest) -> None:
        """Without the lock: another program may have removed the file; the disk wins."""
        with self._lock:
            names = self.index.named_by(chunk)
            if self.holds(chunk) and not any(self.files.has(name, chunk) for name in names):
                logger.warning("chunk %s vanished from the cache directory; dropping it from the index", chunk)
                self.index.lose(chunk)

    def _delete(self, victims: Sequence[Victim], reason: EvictionReason, decisions: Sequence[Event]) -> None:
        """Delete victims that the index has already dropped."""
        self.events.decided(decisions)
        count = 0
        try:
            for victim in victims:
                self.files.remove_all(victim.manifest)
                self._noted.pop(victim.manifest, None)
                count += 1
        except BdnError as error:
            self._count_again(victims[count:])
            left = (victim.manifest for victim in victims[count:])
            self.events.decided(kept(filter(self.index.holds, left), error))
            raise
        finally:
            if count:
                self.events.evicted(reason, victims[:count])
                self.events.changed()

    def _count_again(self, victims: Iterable[Victim]) -> None:
        """Count what the folders still hold. Uses the victims' times: the started deletion changed the folders' own."""
        for victim in victims:
            with suppress(BdnError):  # a folder that cannot be scanned cannot be served; the next start counts it
                found = self.files.look_at(victim.manifest)
                if found is not None:
                    self.index.restore(victim.manifest, found.chunks, last_used=victim.last_used)


def _made_room(victim: Victim, newcomer: Digest) -> Event:
    return Event.of(
        "made_room", {"tier": "cluster", "bytes": victim.size, "newcomer": str(newcomer)}, manifest=victim.manifest
    )
