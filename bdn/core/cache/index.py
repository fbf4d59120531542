"""What each tier of a cache holds, for whom, and what is evicted to make room: every rule, and no I/O.

Content is counted once, however many manifests name it. Manifests are evicted whole. Methods change the state and return the
I/O that the caller must now do; a caller that fails half-way can be killed, because the index is rebuilt from disk.

What looks at many manifests is a generator of ``Steps``, so that an event loop can do other work between two of them. Meanwhile
contents may become whole and leases may end; manifests come, go and are leased only by the caller of the steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from bdn.core.cache.digest_table import DigestTable, NameTable
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError

LOOKS_AT_ONCE: Final = 2_000  # contents between two steps: some milliseconds

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[None, None, _Result]


def at_once(steps: Steps[_Result]) -> _Result:
    """All steps one after the other; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _Result = ended.value
            return result


class SpaceLedger:
    """Bytes per content, each content once: *reserved* before its first byte, *committed* when it is whole.

    Keeps running sums; every method is constant time. The budget is not ours: it changes with the disk, so callers pass it.
    """

    def __init__(self, sizes: MutableMapping[Digest, int]) -> None:
        """``sizes`` is what sizes are kept in, twice as large."""
        self._sizes = sizes  # twice the bytes, and one more where the content is committed
        self.reserved_count = 0  # contents that are promised and not whole yet
        self.reserved_bytes = 0
        self.committed_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Committed and reserved together: what must never pass the budget."""
        return self.reserved_bytes + self.committed_bytes

    @property
    def count(self) -> int:
        """How many contents are counted."""
        return len(self._sizes)

    def size_of(self, digest: Digest) -> int | None:
        """The bytes counted for this content, or None when it is not counted."""
        found = self._sizes.get(digest)
        return None if found is None else found >> 1

    def is_committed(self, digest: Digest) -> bool:
        """Whether the content is whole on this disk."""
        return bool(self._sizes.get(digest, 0) & 1)

    def reserve(self, digest: Digest, size: int) -> None:
        """Set space aside for content that is not counted yet."""
        self._sizes[digest] = size << 1
        self.reserved_count += 1
        self.reserved_bytes += size

    def commit(self, digest: Digest) -> None:
        """A fill finished: its reservation becomes committed content. Committing twice changes nothing."""
        found = self._sizes[digest]
        if found & 1:
            return
        self._sizes[digest] = found | 1
        self.reserved_count -= 1
        self.reserved_bytes -= found >> 1
        self.committed_bytes += found >> 1

    def release(self, digest: Digest) -> int:
        """The content left the disk, whole or partial; returns the bytes that were counted, 0 when none were."""
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
    """One stage of one job. ``organisation`` is whose stage it is, where that is known."""

    stage_id: str
    job_id: str
    organisation: str | None = None

    def __str__(self) -> str:
        return f"job {self.job_id} (stage {self.stage_id})"


class LeaseBook:
    """Holders by manifest. A holder counts until it is released, however long ago its stage expired.

    Releasing at one place keeps the view, the mount and the lease of a stage together; a lease that vanished by itself
    would leave a mount over content that may go.
    """

    def __init__(self) -> None:
        self._by_manifest: dict[Digest, dict[str, Holder]] = {}
        self._by_stage: dict[str, dict[Digest, None]] = {}

    def take(self, manifest: Digest, holder: Holder) -> None:
        """Lease, or lease again."""
        self._by_manifest.setdefault(manifest, {})[holder.stage_id] = holder
        self._by_stage.setdefault(holder.stage_id, {})[manifest] = None

    def end(self, stage_id: str) -> tuple[Digest, ...]:
        """End all leases of a stage; returns the manifests that it held."""
        held = tuple(self._by_stage.pop(stage_id, ()))
        for manifest in held:
            del self._by_manifest[manifest][stage_id]
            if not self._by_manifest[manifest]:
                del self._by_manifest[manifest]
        return held

    def of(self, stage_id: str) -> tuple[Digest, ...]:
        """What a stage holds."""
        return tuple(self._by_stage.get(stage_id, ()))

    def holders(self, manifest: Digest) -> tuple[Holder, ...]:
        """Who holds this manifest, oldest lease first."""
        return tuple(self._by_manifest.get(manifest, {}).values())

    def is_leased(self, manifest: Digest) -> bool:
        """Whether anybody holds it."""
        return manifest in self._by_manifest

    def leased(self) -> tuple[Digest, ...]:
        """Every manifest that somebody holds."""
        return tuple(self._by_manifest)


class RecencyOrder:
    """Manifests by last use, kept by us: the file system's atime depends on mount options.

    A use is a time in seconds since the epoch, so that the order survives a restart.
    A manifest's files are touched together; otherwise LRU would evict half a model.
    """

    def __init__(self) -> None:
        self._last_used: dict[Digest, float] = {}

    def touch(self, manifest: Digest, now: float) -> None:
        """Used at ``now``. A clock that went back makes no manifest older."""
        self._last_used[manifest] = max(now, self._last_used.pop(manifest, now))

    def forget(self, manifest: Digest) -> None:
        """No longer held."""
        self._last_used.pop(manifest, None)

    def last_used(self, manifest: Digest) -> float:
        """When it was used last; ``KeyError`` when it is not held."""
        return self._last_used[manifest]

    def oldest_first(self) -> Iterator[Digest]:
        """All of them, least recently used first; equal times in the order of their touches. Sorted when the first is taken."""
        for manifest, _ in sorted(self._last_used.items(), key=itemgetter(1)):
            yield manifest


EvictionReason = Literal["lru", "request", "forced", "trim"]
IN_USE_SECONDS: Final = 60.0  # so long after its last use, others in the cluster are likely to want more of a manifest


@dataclass(frozen=True, slots=True)
class Victim:
    """A manifest to remove, and the contents that go with it because nothing else names them."""

    manifest: Digest
    contents: tuple[Digest, ...]
    size: int  # bytes freed
    holders: tuple[Holder, ...] = ()  # whose leases are broken; only a forced eviction has any
    last_used: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Leased:
    """A manifest that an eviction left alone, and who holds it."""

    manifest: Digest
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """What to do for content that was admitted: delete the victims first, then fill what is missing."""

    victims: tuple[Victim, ...]
    missing: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What an eviction takes, and what it must leave because it is leased."""

    victims: tuple[Victim, ...]
    refused: tuple[Leased, ...]


_Contents = TypeVar("_Contents", bound=Collection[Digest])


@dataclass(slots=True)
class _Chosen:
    """The victims of a plan so far."""

    victims: list[Victim] = field(default_factory=list)
    size: int = 0  # bytes that they free
    files: int = 0  # contents that they free
    names_left: dict[Digest, int] = field(default_factory=dict)  # of shared contents: manifests that are not chosen
    looks: int = 0  # at contents


class TierIndex(ABC, Generic[_Contents]):
    """The state of one tier: contents by manifest. Times are seconds since the epoch; sizes and budgets are bytes.

    The ledger is for reading: it is changed here, so that what depends on it follows.
    """

    def __init__(self, ledger: SpaceLedger, named_by: MutableMapping[Digest, frozenset[Digest]]) -> None:
        self.ledger = ledger
        self.leases = LeaseBook()
        self.recency = RecencyOrder()
        self._contents: dict[Digest, _Contents] = {}  # by manifest
        self._named_by = named_by  # content -> manifests; contents with the same manifests share one set

    # --- evicting ---

    def plan(self, manifests: Iterable[Digest], *, force: bool = False) -> EvictionPlan:
        """As ``planning`` of these manifests."""
        return at_once(self.planning(manifests, force=force))

    def plan_lru(self, size: int, *, force: bool = False) -> EvictionPlan:
        """As ``planning`` of so many bytes."""
        return at_once(self.planning(size=size, force=force))

    def planning(
        self, manifests: Iterable[Digest] | None = None, *, size: int | None = None, force: bool = False
    ) -> Steps[EvictionPlan]:
        """What evicting these manifests would take; None: all, least recently used first. Changes nothing.

        Ends when ``size`` bytes are freed, if that is given. Unknown manifests are passed over.
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

    def evict(self, plan: EvictionPlan) -> None:
        """As ``evicting``, at once."""
        at_once(self.evicting(plan.victims))

    def evicting(self, victims: Iterable[Victim]) -> Steps[None]:
        """Forget victims, each at once. The caller releases broken leases' stages first, and deletes afterwards."""
        looks = 0
        for victim in victims:
            looks += len(self._contents[victim.manifest])
            self._forget(victim.manifest)
            if looks >= LOOKS_AT_ONCE:
                looks = 0
                yield

    # --- reading ---

    def manifests(self) -> tuple[Digest, ...]:
        """Held manifests, least recently used first."""
        return tuple(self.recency.oldest_first())

    def holds(self, manifest: Digest) -> bool:
        """Whether the manifest is held, whole or in part."""
        return manifest in self._contents

    def named_by(self, content: Digest) -> frozenset[Digest]:
        """The held manifests that name this content, whether it is whole or on its way."""
        return self._named_by.get(content, frozenset())

    # --- inside ---

    @abstractmethod
    def _freed(self, content: Digest) -> int | None:
        """The bytes that are free at once when the last manifest that names this content goes; None: it is not here yet."""

    def _making_room(
        self,
        absent: Mapping[Digest, int],
        stays: Callable[[Digest], bool],
        protected_bytes: Callable[[], Steps[int]],
        *,
        budget: int,
        free_files: int | None = None,
        spare: Collection[Digest] = (),
    ) -> Steps[tuple[Victim, ...]]:
        """Least recently used manifests that do not stay until the absent contents fit; contents to ``spare`` stay. Changes nothing.

        Content that needs no bytes lacks none, even in a cache that is over its budget. A later victim may free what an
        earlier one shares with it, so that the earlier one was not needed; it is older, though, and LRU order is the promise.

        Raises ``CacheFullError``: all of them together are not enough.
        """
        needed, used = sum(absent.values()), self.ledger.used_bytes
        bytes_over = used + needed - budget if needed else 0
        files_over = 0 if free_files is None else len(absent) - free_files
        chosen = _Chosen()
        candidates = (one for one in self.recency.oldest_first() if not stays(one))
        while chosen.size < bytes_over or chosen.files < files_over:
            manifest = next(candidates, None)
            if manifest is None:
                files: tuple[int | None, int | None]
                files = (None, None) if chosen.size < bytes_over else (len(absent), free_files)
                protected = yield from protected_bytes()
                raise CacheFullError(needed, max(0, budget - used), protected, budget, *files)
            yield from self._choose(manifest, chosen, spare=spare)
        return tuple(chosen.victims)

    def _choose(
        self, manifest: Digest, chosen: _Chosen, holders: tuple[Holder, ...] = (), spare: Collection[Digest] = ()
    ) -> Steps[None]:
        """The next victim. Looks once at each of its contents."""
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
            if names > 1 or (size := self._freed(content)) is None or content in spare:
                continue
            contents.append(content)
            freed += size
        chosen.size += freed
        chosen.files += len(contents)
        chosen.victims.append(
            Victim(manifest, tuple(contents), freed, holders, last_used=self.recency.last_used(manifest))
        )

    def _forget(self, manifest: Digest) -> None:
        left: dict[frozenset[Digest], frozenset[Digest]] = {}  # by what there was: one set for all
        for content in self._contents.pop(manifest):
            names = self._named_by[content]
            if len(names) > 1:
                self._named_by[content] = left.get(names) or left.setdefault(names, names - {manifest})
            else:
                del self._named_by[content]
                if self._freed(content) is not None:
                    self.ledger.release(content)
        self.recency.forget(manifest)
        for holder in self.leases.holders(manifest):
            self.leases.end(holder.stage_id)


@dataclass(slots=True)
class _Totals:
    """Sums over a manifest's contents: there may be a million, and every heartbeat asks."""

    counted: int = 0  # bytes, whole and on their way
    whole: int = 0  # contents


class CacheIndex(TierIndex[Mapping[Digest, int]]):
    """The node tier: manifests are admitted whole, and leased ones stay. Contents are files, with their sizes."""

    def __init__(self) -> None:
        super().__init__(SpaceLedger({}), {})
        self._totals: dict[Digest, _Totals] = {}  # by manifest
        self._shared: set[Digest] = set()  # contents that several manifests name

    # --- admitting ---

    def admit(
        self,
        manifest: Digest,
        contents: Mapping[Digest, int],
        holder: Holder,
        *,
        now: float,
        budget: int,
        free_files: int | None = None,
    ) -> Admission:
        """As ``admitting``, at once."""
        return at_once(self.admitting(manifest, contents, holder, now=now, budget=budget, free_files=free_files))

    def admitting(
        self,
        manifest: Digest,
        contents: Mapping[Digest, int],
        holder: Holder,
        *,
        now: float,
        budget: int,
        free_files: int | None = None,
    ) -> Steps[Admission]:
        """Lease a manifest for ``holder`` and reserve what it lacks, evicting least recently used manifests for room.

        ``free_files`` is how many files more there may be; None for any number.

        Raises:
            CacheTooSmallError: the manifest could not fit an empty cache of this budget. Nothing changed.
            CacheFullError: leased content leaves no room now, of bytes or of files. Nothing changed.
        """
        total = sum(contents.values())
        if total > budget and not all(map(self.ledger.is_committed, contents)):
            raise CacheTooSmallError(total, budget)
        absent = {digest: size for digest, size in contents.items() if self.ledger.size_of(digest) is None}
        victims = yield from self._making_room(
            absent,
            lambda one: one == manifest or self.leases.is_leased(one),
            self.counting_leased,
            budget=budget,
            free_files=free_files,
            spare=contents,
        )
        self._remember(manifest, contents, now)  # first, so that forgetting a victim spares what the two share
        yield from self.evicting(victims)
        for digest, size in absent.items():
            self._reserve(digest, size)
        self.leases.take(manifest, holder)
        return Admission(victims, tuple(digest for digest in contents if not self.ledger.is_committed(digest)))

    def restore(
        self, manifest: Digest, contents: Mapping[Digest, int], present: Mapping[Digest, bool], *, last_used: float
    ) -> None:
        """Count a manifest that a start-up scan found. ``present`` says of each content on disk whether it is whole."""
        self._remember(manifest, contents, last_used)
        for digest, size in contents.items():
            if digest in present and self.ledger.size_of(digest) is None:
                self._reserve(digest, size)
                if present[digest]:
                    self.commit(digest)

    def commit(self, content: Digest) -> None:
        """A fill finished: the content is whole and durable. Constant time: there may be a million of them.

        Committing twice changes nothing; ``KeyError`` for what is not counted.
        """
        if self.ledger.is_committed(content):
            return
        self.ledger.commit(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].whole += 1

    def lose(self, content: Digest) -> int:
        """Content is no longer on disk (found missing or damaged); its manifests stay and are incomplete."""
        whole = self.ledger.is_committed(content)
        size = self.ledger.release(content)
        for manifest in self._named_by.get(content, ()):
            self._totals[manifest].counted -= size
            self._totals[manifest].whole -= whole
        return size

    # --- reading ---

    def contents_of(self, manifest: Digest) -> Mapping[Digest, int]:
        """Size by content; ``KeyError`` when the manifest is not held."""
        return self._contents[manifest]

    def size_of(self, manifest: Digest) -> int:
        """Bytes counted for a manifest's contents; ``KeyError`` when it is not held."""
        return self._totals[manifest].counted

    def is_complete(self, manifest: Digest) -> bool:
        """Whether every content of the manifest is committed; False for a manifest that is not held."""
        contents = self._contents.get(manifest)
        return contents is not None and self._totals[manifest].whole == len(contents)

    def is_complete_but_for(self, manifest: Digest, content: Digest) -> bool:
        """Whether this content is all that a manifest which names it lacks; False for a manifest that is not held."""
        contents = self._contents.get(manifest, {})
        is_lacking = content in contents and not self.ledger.is_committed(content)
        return is_lacking and self._totals[manifest].whole + 1 == len(contents)

    def leased_bytes(self) -> int:
        """As ``counting_leased``, at once."""
        return at_once(self.counting_leased())

    def counting_leased(self) -> Steps[int]:
        """Bytes counted for contents that some lease protects, each once. Looks at what several manifests share."""
        leased = self._contents.keys() & self.leases.leased()
        total = sum(self._totals[manifest].counted for manifest in leased)
        if len(leased) > 1:
            for number, content in enumerate(tuple(self._shared)):
                if number % LOOKS_AT_ONCE == LOOKS_AT_ONCE - 1:
                    yield
                total -= self._counted_again(content, leased)
        return total

    # --- inside ---

    def _freed(self, content: Digest) -> int | None:
        return self.ledger.size_of(content)

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
        now_named: dict[frozenset[Digest], frozenset[Digest]] = {}  # by what there was: one set for all
        nobody = frozenset[Digest]()
        for content in contents:
            before = self._named_by.get(content, nobody)
            self._named_by[content] = now_named.get(before) or now_named.setdefault(before, before | {manifest})
            if before:
                self._shared.add(content)
            totals.counted += self.ledger.size_of(content) or 0
            totals.whole += self.ledger.is_committed(content)

    def _forget(self, manifest: Digest) -> None:
        contents = self._contents[manifest]
        super()._forget(manifest)
        del self._totals[manifest]
        self._shared -= {content for content in self._shared & contents.keys() if len(self._named_by[content]) == 1}


class ChunkIndex(TierIndex[DigestTable]):
    """The cluster tier: an owner holds its share of a manifest's chunks, admits them one by one, and leases none.

    Manifests that were used within the last ``IN_USE_SECONDS`` stay. Chunks on their way are counted until they end.
    """

    def __init__(self) -> None:
        super().__init__(SpaceLedger(DigestTable(width=4)), NameTable())
        self._bytes: dict[Digest, int] = {}  # of a manifest's chunks

    def admit(self, manifest: Digest, chunk: Digest, size: int, *, now: float, budget: int) -> Admission:
        """Reserve space for a chunk of a manifest, evicting least recently used manifests that nobody uses now.

        Nothing is missing when the chunk is counted already, whole or on its way: the manifest only names it, too.

        Raises:
            CacheTooSmallError: the chunk could not fit an empty tier of this budget. Nothing changed.
            CacheFullError: what is in use leaves no room now. Nothing changed.
        """
        if self.ledger.size_of(chunk) is not None:
            self._name(manifest, chunk, now)
            return Admission((), ())
        if size > budget:
            raise CacheTooSmallError(size, budget)

        def stays(one: Digest) -> bool:
            return one == manifest or now - self.recency.last_used(one) < IN_USE_SECONDS

        def bytes_in_use() -> Steps[int]:
            yield
            return sum(self.size_of(one) for one in self._contents if stays(one))

        victims = at_once(self._making_room({chunk: size}, stays, bytes_in_use, budget=budget))
        at_once(self.evicting(victims))
        self.ledger.reserve(chunk, size)
        self._name(manifest, chunk, now)
        return Admission(victims, (chunk,))

    def commit(self, chunk: Digest) -> frozenset[Digest]:
        """The chunk is on disk; returns who names it. Nobody does when all were evicted meanwhile: then it must go again."""
        names = self.named_by(chunk)
        if names:
            self.ledger.commit(chunk)
        else:
            self.ledger.release(chunk)
        return names

    def lose(self, chunk: Digest) -> frozenset[Digest]:
        """The chunk is not here (any more): it did not come, it rots, or a whole file has it. Returns who named it."""
        names = self._named_by.pop(chunk, frozenset())
        size = self.ledger.release(chunk)
        for manifest in names:
            del self._contents[manifest][chunk]
            self._bytes[manifest] -= size
            if not self._contents[manifest]:
                del self._contents[manifest], self._bytes[manifest]
                self.recency.forget(manifest)
        return names

    def restore(self, manifest: Digest, chunks: Mapping[Digest, int], *, last_used: float) -> None:
        """Count what a start-up scan found."""
        for chunk, size in chunks.items():
            if self.ledger.size_of(chunk) is None:
                self.ledger.reserve(chunk, size)
                self.ledger.commit(chunk)
            self._name(manifest, chunk, last_used)

    # --- reading ---

    def size_of(self, manifest: Digest) -> int:
        """The bytes of a manifest's chunks here; 0 when it has none."""
        return self._bytes.get(manifest, 0)

    def chunks_of(self, manifest: Digest) -> frozenset[Digest]:
        """The chunks of a manifest that are whole here; none when it has none."""
        return frozenset(one for one in self._contents.get(manifest, ()) if self.ledger.is_committed(one))

    def committed(self) -> tuple[Digest, ...]:
        """Every chunk that is whole here."""
        return tuple(chunk for chunk in self._named_by if self.ledger.is_committed(chunk))

    # --- inside ---

    def _freed(self, content: Digest) -> int | None:
        return self.ledger.size_of(content) if self.ledger.is_committed(content) else None

    def _name(self, manifest: Digest, chunk: Digest, now: float) -> None:
        chunks = self._contents.setdefault(manifest, DigestTable())
        if chunk not in chunks:
            chunks[chunk] = 0
            self._bytes[manifest] = self._bytes.get(manifest, 0) + (self.ledger.size_of(chunk) or 0)
            self._named_by[chunk] = self.named_by(chunk) | {manifest}
        self.recency.touch(manifest, now)

    def _forget(self, manifest: Digest) -> None:
        super()._forget(manifest)
        del self._bytes[manifest]
