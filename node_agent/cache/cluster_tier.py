"""The cluster tier of one agent: the chunks that it holds for its peers, within a budget of their own.

On disk it is ``cluster/chunks/<manifest>/<chunk>``, whole chunks under every manifest that names them. The folders are the
whole truth: a manifest's chunks are what its folder holds, a chunk of two manifests is two links to one file, and a folder's
modification time says when the manifest was used last. So there is no record that could disagree with the disk, and nothing
to mend after a kill at any point: ``incoming`` holds rubbish then, and that is all.
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
_TOUCH_SECONDS: Final = 30.0  # between two notes on disk about a manifest's use: what a kill costs LRU order


@dataclass(frozen=True)
class FoundChunks:
    """A manifest's folder as it was found: its chunks with their sizes, and its last use."""

    manifest: Digest
    chunks: dict[Digest, int]
    last_used: float


class ChunkFiles:
    """Everything below ``root``. Methods block, raise ``DiskFailedError``, and may run in several threads at once."""

    def __init__(self, root: Path, writes: DirectWrites) -> None:
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._writes = writes
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot

    def scan(self) -> list[FoundChunks]:
        """Make the folders, remove what a kill left half-written, and look at what is here."""
        with disk_errors(self._chunks):
            for folder in (self._chunks, self._incoming):
                make_folder(folder, 0o700)
            for path in self._incoming.iterdir():
                path.unlink()
            found = [self._look(folder) for folder in self._chunks.iterdir()]
        return [one for one in found if one is not None]

    def look_at(self, manifest: Digest) -> FoundChunks | None:
        """What a manifest's folder holds now; None when that is nothing."""
        with disk_errors(self._chunks / manifest.hex):
            return self._look(self._chunks / manifest.hex)

    def _look(self, folder: Path) -> FoundChunks | None:
        try:
            manifest = Digest(folder.name)
            with os.scandir(folder) as entries:
                chunks = {Digest(entry.name): entry.stat(follow_symlinks=False).st_size for entry in entries}
        except ValueError:  # nothing that we wrote
            remove_tree(folder)
            return None
        if not chunks:
            folder.rmdir()
            return None
        return FoundChunks(manifest, chunks, folder.stat().st_mtime)

    def write(self, content: memoryview) -> Path:
        """A verified chunk on disk, durable and read-only, under no name yet: the caller lets it ``appear``."""
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
        """Let what was written be found under these manifests, or go. A name that a power cut takes is no harm.

        Not while a folder of theirs is removed: it would be removed with the chunk, or not be there for it.
        """
        with disk_errors(aside):
            try:
                for manifest in manifests:
                    self._link(aside, manifest, chunk)
            finally:
                aside.unlink()

    def link(self, chunk: Digest, holder: Digest, manifest: Digest) -> None:
        """The chunk that one manifest's folder holds shall stand in another's as well."""
        with disk_errors(self.path(manifest, chunk)):
            self._link(self.path(holder, chunk), manifest, chunk)

    def open(self, manifest: Digest, chunk: Digest) -> BinaryIO | None:
        """The chunk; None when it is not here."""
        return open_existing(self.path(manifest, chunk))

    def has(self, manifest: Digest, chunk: Digest) -> bool:
        """Whether the chunk stands in this manifest's folder."""
        path = self.path(manifest, chunk)
        with disk_errors(path):
            return path.exists()

    def touch(self, manifest: Digest, now: float) -> None:
        """The manifest was used at ``now``, also after a restart."""
        folder = self._chunks / manifest.hex
        with disk_errors(folder), suppress(FileNotFoundError):
            os.utime(folder, ns=(int(now * 1e9), int(now * 1e9)))

    def remove(self, manifests: Iterable[Digest], chunk: Digest) -> None:
        """Remove one chunk from these manifests' folders."""
        for manifest in manifests:
            path = self.path(manifest, chunk)
            with disk_errors(path):
                path.unlink(missing_ok=True)

    def remove_all(self, manifest: Digest) -> None:
        """Remove a manifest's folder."""
        with disk_errors(self._chunks / manifest.hex):
            remove_tree(self._chunks / manifest.hex)

    def path(self, manifest: Digest, chunk: Digest) -> Path:
        """Where the chunk stands in this manifest's folder."""
        return self._chunks / manifest.hex / chunk.hex

    def _link(self, file: Path, manifest: Digest, chunk: Digest) -> None:
        path = self.path(manifest, chunk)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.link(file, path)


@dataclass(frozen=True)
class ClusterTier:
    """The rules of ``ChunkIndex``, carried out on disk. All methods may be called from any thread, and block.

    One lock is held while the index changes and victims are deleted, so that nobody is given room that is still full, or
    brings back a chunk that is about to be deleted. Whoever opens a chunk does not take it: a peer never waits for a
    deletion, and a file that is open stays readable when it is evicted. What a failing disk does not delete is counted again.

    ``budget`` says in bytes what may be held now; ``events`` are told in the caller's thread.
    """

    files: ChunkFiles
    index: ChunkIndex
    budget: Callable[[], int]
    clock: Callable[[], float]
    events: CacheEvents
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _used: dict[Digest, float] = field(default_factory=dict)  # uses that the index has not heard of
    _noted: dict[Digest, float] = field(default_factory=dict)  # uses that the disk has heard of

    def load(self) -> None:
        """Count what is on disk. Before anything else."""
        for found in sorted(self.files.scan(), key=lambda one: one.last_used):
            self.index.restore(found.manifest, found.chunks, last_used=found.last_used)

    # --- reading ---

    def open(self, chunk: Digest) -> BinaryIO | None:
        """The chunk's file, which the caller closes; None when it is not held. The manifests that name it are in use."""
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
        """Whether the chunk is whole here, as far as we know."""
        return self.index.ledger.is_committed(chunk)

    def manifests(self) -> tuple[Digest, ...]:
        """The manifests of which some chunk is here or on its way."""
        with self._lock:
            return self.index.manifests()

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The chunks that are whole here for a manifest. Nobody uses them for that."""
        with self._lock:
            return self.index.chunks_of(manifest)

    # --- taking in ---

    def bring(self, manifest: Digest, chunk: Digest, buffer: memoryview, read: Callable[[memoryview], object]) -> bool:
        """Make room for a chunk, read it into ``buffer``, which is as long, and hold it.

        False when it was not read: it is here already, or another call brings it, and the manifest only names it as well.

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
            with self._lock:  # meanwhile others may have named it, and some or all may have been evicted
                self.files.appear(aside, chunk, self.index.named_by(chunk))
                self.index.commit(chunk)
        except BaseException:
            self.lose(chunk)
            raise
        if is_new:
            self.events.changed()
        return True

    def keep(self, manifest: Digest, chunk: Digest, content: memoryview) -> bool:
        """Hold a verified chunk that a fill of this node brought. False when that cannot be: the fill does without."""
        try:
            self.bring(manifest, chunk, content, lambda _: None)
        except (CacheFullError, CacheTooSmallError):
            return False
        except BdnError as error:
            logger.warning("chunk %s is not kept for the cluster: %s", chunk, error)
            return False
        return True

    # --- taking out ---

    def lose(self, chunk: Digest) -> None:
        """Hold the chunk no more: it did not come, or it is not what its name says."""
        with self._lock:
            self.files.remove(self.index.lose(chunk), chunk)

    def drop(self, is_elsewhere: Callable[[Digest], bool]) -> int:
        """Let go of chunks that a whole file of this node has as well, and serves just as well; returns how many."""
        with self._lock:
            covered = [chunk for chunk in self.index.committed() if is_elsewhere(chunk)]
            for chunk in covered:
                self.files.remove(self.index.named_by(chunk), chunk)  # first: what cannot be removed stays counted
                self.index.lose(chunk)
        return len(covered)

    def evict(
        self, plan: Callable[[ChunkIndex], EvictionPlan], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Carry out what ``plan`` decides about the index as it is while nobody else changes it; ``account`` says why.

        Raises ``DiskFailedError``: what could not be deleted is held as before.
        """
        with self._lock:
            self._hear_of_uses()
            decided = plan(self.index)
            self.index.evict(decided)
            self._delete(decided.victims, reason, list(map(account, decided.victims)))
        return decided

    def plan(self, plan: Callable[[ChunkIndex], EvictionPlan]) -> EvictionPlan:
        """What ``evict`` would do now."""
        with self._lock:
            self._hear_of_uses()
            return plan(self.index)

    def trim(self) -> None:
        """Evict what is over the budget: the disk is fuller than it was, or the operator lowered it."""
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

    # --- inside; the lock is held, except where it says otherwise ---

    def _touch(self, manifest: Digest) -> None:
        """Without the lock: storing into a dictionary is one step under the interpreter's."""
        now = self.clock()
        self._used[manifest] = now
        if now - self._noted.get(manifest, 0) >= _TOUCH_SECONDS:
            self._noted[manifest] = now
            with suppress(BdnError):  # the order of eviction after the next restart is all that is lost
                self.files.touch(manifest, now)

    def _hear_of_uses(self) -> None:
        while self._used:
            manifest, now = self._used.popitem()
            if self.index.holds(manifest):
                self.index.recency.touch(manifest, now)
            else:
                self._noted.pop(manifest, None)

    def _link(self, chunk: Digest, manifest: Digest) -> None:
        """A manifest that names a whole chunk has it in its folder: so it stays when the others go."""
        if not self.holds(chunk):
            return  # on its way: whoever brings it lets it appear for all
        names = self.index.named_by(chunk)
        source = next((name for name in names if name != manifest and self.files.has(name, chunk)), None)
        if source is not None:
            self.files.link(chunk, source, manifest)

    def _check(self, chunk: Digest) -> None:
        """Without the lock: somebody has taken the file away behind our back; the disk wins."""
        with self._lock:
            names = self.index.named_by(chunk)
            if self.holds(chunk) and not any(self.files.has(name, chunk) for name in names):
                logger.warning("chunk %s is not on disk any more", chunk)
                self.index.lose(chunk)

    def _delete(self, victims: Sequence[Victim], reason: EvictionReason, decisions: Sequence[Event]) -> None:
        """The index has forgotten them."""
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
        """What their folders still hold. Not by the folders' times: a deletion that began has set them."""
        for victim in victims:
            with suppress(BdnError):  # what cannot even be looked at cannot be served either; the next start counts it
                found = self.files.look_at(victim.manifest)
                if found is not None:
                    self.index.restore(victim.manifest, found.chunks, last_used=victim.last_used)


def _made_room(victim: Victim, newcomer: Digest) -> Event:
    return Event.of(
        "made_room", {"tier": "cluster", "bytes": victim.size, "newcomer": str(newcomer)}, manifest=victim.manifest
    )
