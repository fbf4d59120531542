"""The rules of the node tier without I/O: what it holds, for which stages, and what it evicts to make room.

Content is counted once, however many manifests name it. Manifests are evicted whole. Methods change the state and
return the I/O that the caller must now do. A caller may be killed half-way, because the index is rebuilt from disk.

Methods that scan many manifests are generators of ``Steps``, so that an event loop can do other work between two steps.
Meanwhile contents may become whole and leases may end; only the caller of the steps adds, removes or leases manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal, TypeAlias, TypeVar

from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError

LOOKS_AT_ONCE: Final = 2_000  # contents scanned between two steps: some milliseconds

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[None, None, _Result]


class SpaceLedger:
    """Bytes per content, each content once: *reserved* before its first byte, *committed* when it is whole.

    Keeps running sums; every method is constant time. Callers pass the budget, because it changes with the disk.
    """

    def __init__(self, sizes: MutableMapping[Digest, int]) -> None:
        self._sizes = sizes  # twice the bytes, plus one where the content is committed
        self.reserved_count = 0  # contents that are reserved and not whole yet
        self.reserved_bytes = 0
        self.committed_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Committed plus reserved bytes, which must never exceed the budget."""
        return self.reserved_bytes + self.committed_bytes

    @property
    def count(self) -> int:
        return len(self._sizes)

    def size_of(self, digest: Digest) -> int | None:
        """The bytes counted for this content, or None."""
        found = self._sizes.get(digest)
        return None if found is None else found >> 1

    def is_committed(self, digest: Digest) -> bool:
        """Whether the content is whole on this disk."""
        return bool(self._sizes.get(digest, 0) & 1)

    def reserve(self, digest: Digest, size: int) -> None:
        """Reserve space for content that is not counted yet."""
        self._sizes[digest] = size << 1
        self.reserved_count += 1
        self.reserved_bytes += size

    def commit(self, digest: Digest) -> None:
        """Turn a finished fill's reservation into committed content. Idempotent."""
        found = self._sizes[digest]
        if found & 1:
            return
        self._sizes[digest] = found | 1
        self.reserved_count -= 1
        self.reserved_bytes -= found >> 1
        self.committed_bytes += found >> 1

    def release(self, digest: Digest) -> int:
        """Stop counting content that left the disk, whole or partial. Returns its counted bytes, or 0."""
        found = self._sizes.pop(digest, None)
        if found is None:
            return 0
        if found & 1:
            self.committed_bytes -= found >> 1
        else:
            self.reserved_count -= 1
            self.reserved_bytes -= found >> 1
        return found >> 1


@dataclass(frozen=True, slots=True)
class Holder:
    """One stage of one job. ``organisation`` is the stage's owner, where known."""

    stage_id: str
    job_id: str
    organisation: str | None = None

    def __str__(self) -> str:
        return f"job {self.job_id} (stage {self.stage_id})"


class LeaseBook:
    """Holders by manifest. A holder counts until it is released, however long ago its stage expired.

    Releasing in one place keeps the view, the mount and the lease of a stage together. A lease that vanished by itself
    would leave a mount over content that may be evicted.
    """

    def __init__(self) -> None:
        self._by_manifest: dict[Digest, dict[str, Holder]] = {}
        self._by_stage: dict[str, dict[Digest, None]] = {}

    def take(self, manifest: Digest, holder: Holder) -> None:
        self._by_manifest.setdefault(manifest, {})[holder.stage_id] = holder
        self._by_stage.setdefault(holder.stage_id, {})[manifest] = None

    def end(self, stage_id: str) -> tuple[Digest, ...]:
        """Release all leases of a stage. Returns the manifests that it held."""
        held = tuple(self._by_stage.pop(stage_id, ()))
        for manifest in held:
            del self._by_manifest[manifest][stage_id]
            if not self._by_manifest[manifest]:
                del self._by_manifest[manifest]
        return held

    def of(self, stage_id: str) -> tuple[Digest, ...]:
        return tuple(self._by_stage.get(stage_id, ()))

    def holders(self, manifest: Digest) -> tuple[Holder, ...]:
        """The holders of a manifest, oldest lease first."""
        return tuple(self._by_manifest.get(manifest, {}).values())

    def is_leased(self, manifest: Digest) -> bool:
        return manifest in self._by_manifest

    def leased(self) -> tuple[Digest, ...]:
        return tuple(self._by_manifest)


class RecencyOrder:
    """Manifests by last use. The file system's atime is unusable: it depends on mount options.

    Uses are in seconds since the epoch, so that the order survives a restart. A manifest's files are touched together;
    otherwise LRU would evict half a model.
    """

    def __init__(self) -> None:
        self._last_used: dict[Digest, float] = {}

    def touch(self, manifest: Digest, now: float) -> None:
        """Record a use at ``now``. A clock that went back makes no manifest older."""
        self._last_used[manifest] = max(now, self._last_used.pop(manifest, now))

    def forget(self, manifest: Digest) -> None:
        self._last_used.pop(manifest, None)

    def last_used(self, manifest: Digest) -> float:
        """Raises ``KeyError`` when the manifest is not held."""
        return self._last_used[manifest]

    def oldest_first(self) -> Iterator[Digest]:
        """All manifests, least recently used first; equal times in order of touch. Sorts at the first ``next``."""
        for manifest, _ in sorted(self._last_used.items(), key=itemgetter(1)):
            yield manifest


EvictionReason = Literal["lru", "request", "forced", "trim"]


@dataclass(frozen=True, slots=True)
class Victim:
    """A manifest to remove, with the files of the node tier that no other manifest names."""

    manifest: Digest
    contents: tuple[Digest, ...]
    size: int  # bytes freed
    holders: tuple[Holder, ...] = ()  # owners of broken leases; only in a forced eviction
    last_used: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Leased:
    """A leased manifest that an eviction skipped, with its holders."""

    manifest: Digest
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The I/O for an admitted manifest: delete the victims first, then fill what is missing."""

    victims: tuple[Victim, ...]
    missing: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What an eviction removes, and what it skips because of leases."""

    victims: tuple[Victim, ...]
    refused: tuple[Leased, ...]


@dataclass(slots=True)
class _Chosen:
    victims: list[Victim] = field(default_factory=list)
    size: int = 0  # bytes freed
    files: int = 0  # contents freed
    names_left: dict[Digest, int] = field(default_factory=dict)  # by shared content: manifests not chosen
    looks: int = 0  # number of contents scanned


@dataclass(slots=True)
class _Totals:
    """Running sums over a manifest's contents: a manifest may have a million, and every heartbeat reads the sums."""

    counted: int = 0  # bytes, committed and reserved
    whole: int = 0  # committed contents


class CacheIndex:
    """The state of the node tier: manifests, admitted whole, with their files. Leased manifests stay.

    Times are seconds since the epoch; sizes and budgets are bytes. Callers only read the ledger: its changes here keep
    dependent state consistent.
    """

    def __init__(self) -> None:
        self.ledger = SpaceLedger({})
        self.leases = LeaseBook()
        self.recency = RecencyOrder()
        self._contents: dict[Digest, Mapping[Digest, int]] = {}  # by manifest: contents with their sizes
        self._named_by: dict[Digest, frozenset[Digest]] = {}  # contents with the same manifests share one set
        self._totals: dict[Digest, _Totals] = {}  # by manifest
        self._shared: set[Digest] = set()  # contents named by several manifests

    # --- admitting ---

    def admitting(
        self,
        manifest: Digest,
        contents: Mapping[Digest, int],
        holder: Holder,
        *,
        now: float,
        budget: int,
        free_files: int | None = None,
    ) -> Steps[Admitted]:
        """Lease a manifest for ``holder`` and reserve what it lacks, evicting least recently used manifests for room.

        ``free_files`` is how many more files fit; None: any number.

        Raises:
            CacheTooSmallError: the manifest could not fit an empty cache of this budget. Nothing changed.
            CacheFullError: leased content leaves no room now, of bytes or of files. Nothing changed.
        """
        total = sum(contents.values())
        if total > budget and not all(map(self.ledger.is_committed, contents)):
            raise CacheTooSmallError(total, budget)
        absent = {digest: size for digest, size in contents.items() if self.ledger.size_of(digest) is None}
        victims = yield from self._making_room(manifest, contents, absent, budget=budget, free_files=free_files)
        self._remember(manifest, contents, now)  # before evicting, so that contents shared with a victim are spared
        yield from self.evicting(victims)
        for digest, size in absent.items():
            self._reserve(digest, size)
        self.leases.take(manifest, holder)
        return Admitted(victims, tuple(digest for digest in contents if not self.ledger.is_committed(digest)))

    def restore(
        self, manifest: Digest, contents: Mapping[Digest, int], present: Mapping[Digest, bool], *, last_used: float
    ) -> None:
        """Count a manifest that a start-up scan found. ``present`` maps each content on disk to whether it is whole."""
        self._remember(manifest, contents, last_used)
        for digest, size in contents.items():
            if digest in present and self.ledger.size_of(digest) is None:
                self._reserve(digest, size)
                if present[digest]:
                    self.commit(digest)

    def commit(self, content: Digest) -> None:
        """Mark a filled content as whole and durable. Constant time: there may be a million contents.

        Idempotent. Raises ``KeyError`` for content that is not counted.
        """
        if self.ledger.is_committed(content):
            return
        self.ledger.commit(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].whole += 1

    def lose(self, content: Digest) -> int:
        """Stop counting missing or damaged content; its manifests stay and are incomplete."""
        whole = self.ledger.is_committed(content)
        size = self.ledger.release(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].counted -= size
            self._totals[manifest].whole -= whole
        return size

    # --- evicting ---

    def planning(
        self, manifests: Iterable[Digest] | None = None, *, size: int | None = None, force: bool = False
    ) -> Steps[EvictionPlan]:
        """Plan the eviction of these manifests; None: all, least recently used first. Changes nothing.

        Ends when ``size`` bytes are freed, if given. Skips unknown manifests.
        """
        chosen = _Chosen()
        refused: list[Leased] = []
        candidates = self.recency.oldest_first() if manifests is None else dict.fromkeys(manifests)
        for manifest in candidates:
            if size is not None and chosen.size >= size:
                break
            if manifest not in self._contents:
                continue
            holders = self.leases.holders(manifest)
            if holders and not force:
                refused.append(Leased(manifest, holders))
            else:
                yield from self._choose(manifest, chosen, holders)
        return EvictionPlan(tuple(chosen.victims), tuple(refused))

    def evicting(self, victims: Iterable[Victim]) -> Steps[None]:
        """Remove victims from the index, each atomically.

        The caller releases the stages of broken leases before, and deletes files afterwards.
        """
        looks = 0
        for victim in victims:
            looks += len(self._contents[victim.manifest])
            self._forget(victim.manifest)
            if looks >= LOOKS_AT_ONCE:
                looks = 0
                yield

    # --- reading ---

    def manifests(self) -> tuple[Digest, ...]:
        return tuple(self.recency.oldest_first())

    def holds(self, manifest: Digest) -> bool:
        """Whether the manifest is held, whole or in part."""
        return manifest in self._contents

    def named_by(self, content: Digest) -> frozenset[Digest]:
        """The held manifests that name this content, whether it is whole or being filled."""
        return self._named_by.get(content, frozenset())

    def contents_of(self, manifest: Digest) -> Mapping[Digest, int]:
        """Size by content. Raises ``KeyError`` when the manifest is not held."""
        return self._contents[manifest]

    def size_of(self, manifest: Digest) -> int:
        """Bytes counted for a manifest's contents. Raises ``KeyError`` when the manifest is not held."""
        return self._totals[manifest].counted

    def is_complete(self, manifest: Digest) -> bool:
        """Whether every content of the manifest is committed; False when the manifest is not held."""
        contents = self._contents.get(manifest)
        return contents is not None and self._totals[manifest].whole == len(contents)

    def is_complete_but_for(self, manifest: Digest, content: Digest) -> bool:
        """Whether this content is all that its manifest lacks; False when the manifest is not held."""
        contents = self._contents.get(manifest, {})
        is_lacking = content in contents and not self.ledger.is_committed(content)
        return is_lacking and self._totals[manifest].whole + 1 == len(contents)

    def counting_leased(self) -> Steps[int]:
        """Bytes of contents under a lease, each counted once. Scans only contents of several manifests."""
        leased = self._contents.keys() & self.leases.leased()
        total = sum(self._totals[manifest].counted for manifest in leased)
        if len(leased) > 1:
            for number, content in enumerate(tuple(self._shared)):
                if number % LOOKS_AT_ONCE == LOOKS_AT_ONCE - 1:
                    yield
                total -= self._counted_again(content, leased)
        return total

    # --- inside ---

    def _reserve(self, content: Digest, size: int) -> None:
        self.ledger.reserve(content, size)
        for manifest in self._named_by[content]:
            self._totals[manifest].counted += size

    def _counted_again(self, content: Digest, among: AbstractSet[Digest]) -> int:
        names = len(self._named_by.get(content, frozenset()) & among)
        return max(0, names - 1) * (self.ledger.size_of(content) or 0)

    def _remember(self, manifest: Digest, contents: Mapping[Digest, int], now: float) -> None:
        self.recency.touch(manifest, now)
        if manifest in self._contents:
            return
        self._contents[manifest] = contents
        totals = self._totals[manifest] = _Totals()
        # Set before to set after: equal sets share one object.
        now_named: dict[frozenset[Digest], frozenset[Digest]] = {}
        nobody = frozenset[Digest]()
        for content in contents:
            before = self._named_by.get(content, nobody)
            self._named_by[content] = now_named.get(before) or now_named.setdefault(before, before | {manifest})
            if before:
                self._shared.add(content)
            totals.counted += self.ledger.size_of(content) or 0
            totals.whole += self.ledger.is_committed(content)

    def _making_room(
        self,
        manifest: Digest,
        contents: Mapping[Digest, int],
        absent: Mapping[Digest, int],
        *,
        budget: int,
        free_files: int | None,
    ) -> Steps[tuple[Victim, ...]]:
        """Choose least recently used manifests until the absent contents fit. Changes nothing.

        Leased manifests and the newcomer's contents are not removed. Content that needs no bytes always fits, even in a
        cache over its budget. A later victim may free content shared with an earlier victim, which then was not needed;
        the earlier one is older, though, and LRU order is the promise.

        Raises ``CacheFullError``: all candidates together are not enough.
        """
        needed, used = sum(absent.values()), self.ledger.used_bytes
        bytes_over = used + needed - budget if needed else 0
        files_over = 0 if free_files is None else len(absent) - free_files
        chosen = _Chosen()
        candidates = (one for one in self.recency.oldest_first() if one != manifest and not self.leases.is_leased(one))
        while chosen.size < bytes_over or chosen.files < files_over:
            victim = next(candidates, None)
            if victim is None:
                files: tuple[int | None, int | None]
                files = (None, None) if chosen.size < bytes_over else (len(absent), free_files)
                leased = yield from self.counting_leased()
                raise CacheFullError(needed, max(0, budget - used), leased, budget, *files)
            yield from self._choose(victim, chosen, spare=contents)
        return tuple(chosen.victims)

    def _choose(
        self, manifest: Digest, chosen: _Chosen, holders: tuple[Holder, ...] = (), spare: Collection[Digest] = ()
    ) -> Steps[None]:
        """Add a victim. Scans each of its contents once."""
        contents: list[Digest] = []
        freed = 0
        for content in self._contents[manifest]:
            chosen.looks += 1
            if chosen.looks % LOOKS_AT_ONCE == 0:
                yield
            names = len(self._named_by.get(content, ()))
            if names > 1:
                names = chosen.names_left.get(content, names)
                chosen.names_left[content] = names - 1
            if names > 1 or (size := self.ledger.size_of(content)) is None or content in spare:
                continue
            contents.append(content)
            freed += size
        chosen.size += freed
        chosen.files += len(contents)
        chosen.victims.append(
            Victim(manifest, tuple(contents), freed, holders, last_used=self.recency.last_used(manifest))
        )

    def _forget(self, manifest: Digest) -> None:
        left: dict[frozenset[Digest], frozenset[Digest]] = {}  # set before to set after: equal sets share one object
        for content in self._contents.pop(manifest):
            names = self._named_by[content]
            if len(names) > 1:
                self._named_by[content] = left.get(names) or left.setdefault(names, names - {manifest})
                if len(names) == 2:
                    self._shared.discard(content)
            else:
                del self._named_by[content]
                self.ledger.release(content)
        del self._totals[manifest]
        self.recency.forget(manifest)
        for holder in self.leases.holders(manifest):
            self.leases.end(holder.stage_id)
