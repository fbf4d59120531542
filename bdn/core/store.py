"""What lies in a mirror's store: chunks, slabs of small files, damaged objects and their pieces, what may be collected."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, EMPTY, Buffer, Digest, chunk_count, digest_of, file_digest
from bdn.core.source.upstream import Location, UpstreamFile


class ChunkStore(Protocol):
    """Where mirrored chunks rest. Blocking; called from byte threads."""

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Make the chunk durable under its name. An existing one is kept. Nothing partial is ever visible.

        ``writer`` is the organisation that sends it: its requests to the store alternate with requests of other organisations.
        """

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """The chunk as a seekable file, which the caller closes. ``NotFoundError`` when it is not held.

        ``reader`` is the organisation that the chunk is sent to. The file may take memory for as long as the client reads, so
        that an organisation has a share of it. ``StoreUnavailableError`` at once while it is at its share: the threads that
        send chunks alone release memory, and must not wait for it.
        """

    def keep(self, digests: Sequence[Digest]) -> AbstractSet[Digest]:
        """Count on chunks that were put earlier: whoever looked at them before this does not collect them any more.

        Those that are held. Others are not, or are on their way out: they have to be put again.
        """


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as somebody who collects has seen it."""

    digest: Digest
    size: int
    kept_at: float  # when it was last put or kept, in seconds since the epoch
    stamp: str = ""  # the store's own, where that time does not tell whether it was put or kept since


class CollectableStore(ChunkStore, Protocol):
    """A store out of which chunks are collected while others put, keep and read."""

    def check(self) -> None:
        """Raise ``StoreUnavailableError`` when nothing in the store can be reached."""

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        """Those of these chunks that are held; or all that are held, in the order of their digests.

        One that comes or goes meanwhile may be missed.
        """

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """Remove these chunks but for what somebody put or kept since it was seen, or somebody else removed: the removed ones.

        Who has one open can read it to its end.
        """

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove what was left half-written and last changed before then. How many there are, and their bytes."""


class StoreDisk(NamedTuple):
    """Of the file system where a store rests: bytes that are free, and all of them; which it is, and where."""

    free: int
    size: int
    device: int
    path: str


class MirrorStore(CollectableStore, Protocol):
    """What a mirror rests on: it is scrubbed, too."""

    def fault(self, digest: Digest) -> str | None:
        """What is wrong with the chunk as it rests, or None. It is read past caches. ``BdnError``: cannot be found out now."""

    def set_aside(self, digest: Digest) -> bool:
        """Keep a wrong chunk as evidence, where no reader finds it. False when it is absent, or right after all."""

    def evidence(self) -> int:
        """How many wrong chunks are kept."""

    def disk(self) -> StoreDisk | None:
        """Its disk, if it is this machine's."""

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """The id of the database that the store belongs to, or None.

        ``new`` is written durably where the store has no owner, or with ``replace`` whatever its owner is; of several that are written
        at once, one stays and is returned. The owner is not a chunk: it is not listed, collected or copied.
        """

    def close(self) -> None:
        """Let go of what is open for it."""


@runtime_checkable
class LocatableStore(Protocol):
    """A store whose chunks others may read by themselves. Blocking; safe for several threads."""

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        """Where each of these chunks can be read with GET, whole or in ranges, until its location expires; in their order.

        Nothing is asked for them: one that is not held is located, too, and its reader gets 404. What is read there is compared
        with its digest by who reads it. ``StoreUnavailableError``: credentials that ended cannot be renewed now.
        """


PUBLIC: Final = "public"  # everybody
_OWNED: Final = "organisation:"


_TEAM: Final = ":"  # not a sign of an organisation's name


def reader_of(organisation: str, team: str | None = None) -> str:
    """An organisation, which reads slabs of all its teams, or one team of it, which reads its own."""
    return f"{organisation}{_TEAM}{team}" if team else organisation


def organisation_of(reader: str) -> str:
    """The organisation that a reader is, or belongs to."""
    return reader.partition(_TEAM)[0]


def team_of(reader: str) -> str | None:
    """The team that a reader is; None for a whole organisation."""
    return reader.partition(_TEAM)[2] or None


def scope_of(reader: str) -> str:
    """The scope of what needs the credentials of an organisation or of a team. Scopes of its teams begin with an organisation's."""
    return f"{_OWNED}{reader}"


def below(scope: str) -> str:
    """How the scopes of an organisation's teams begin."""
    return f"{scope}{_TEAM}"


def owner_of(scope: str) -> str | None:
    """The organisation of a scope; None for the public scope."""
    return None if scope == PUBLIC else organisation_of(scope.removeprefix(_OWNED))


_MAGIC: Final = b"\x00BDN slab seal\x00\x02\x00"
_NAME_SIZE: Final = 8
SEAL_SIZE: Final = len(_MAGIC) + 2 * _NAME_SIZE  # bytes


def seal_of(scope: str) -> bytes:
    """What a slab of this scope ends in: nothing for the public scope; else the organisation, then organisation and team."""
    if (owner := owner_of(scope)) is None:
        return b""
    return _MAGIC + b"".join(blake3(one.encode()).digest(_NAME_SIZE) for one in (scope_of(owner), scope))


def is_closed_to(reader: str, tail: bytes) -> bool:
    """Whether a chunk that ends in these ``SEAL_SIZE`` bytes is a slab of another organisation or team."""
    compared = SEAL_SIZE if team_of(reader) else SEAL_SIZE - _NAME_SIZE
    is_sealed = len(tail) == SEAL_SIZE and tail.startswith(_MAGIC)
    return is_sealed and tail[:compared] != seal_of(scope_of(reader))[:compared]


SMALL_FILE_SIZE: Final = 1024 * 1024  # a file of this size or more has chunks of its own
PARCEL_FILES: Final = 256  # one thread fetches them, one by one; more would make a tail where an upstream is far


def is_small(size: int) -> bool:
    """Whether a file of so many bytes shares a slab. An empty file has no bytes that could rest anywhere."""
    return 0 < size < SMALL_FILE_SIZE


def parcels(files: Iterable[UpstreamFile]) -> Iterator[tuple[UpstreamFile, ...]]:
    """Small files in the order given, cut into parcels that become a slab each: of one scope and, with its seal, at most one chunk.

    Not sorted by size to fill slabs to the brim: neighbours are read together and evicted together.
    """
    parcel: list[UpstreamFile] = []
    size = 0
    for file in files:
        is_other = bool(parcel) and file.identity.scope != parcel[0].identity.scope
        if parcel and (is_other or size + file.size > CHUNK_SIZE - SEAL_SIZE or len(parcel) == PARCEL_FILES):
            yield tuple(parcel)
            parcel, size = [], 0
        parcel.append(file)
        size += file.size
    if parcel:
        yield tuple(parcel)


class SlabNeeds:
    """Slabs, what lies in them, and what has gone. Names are whatever the caller uses.

    It speaks of slabs that were added. Before it is asked it is told of everything in these, of every other slice of those
    contents, and of the scopes and damages of every slab named so far.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._scopes: defaultdict[str, set[str]] = defaultdict(set)
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._slabs: defaultdict[str, set[str]] = defaultdict(set)
        self._damaged: set[str] = set()
        self._whole: set[str] = set()
        self._gone: set[str] = set()  # slabs and contents

    # --- what there is ---

    def add_slab(self, slab: str, size: int) -> None:
        """A slab of ``size`` bytes."""
        self._sizes[slab] = size

    def add_scope(self, slab: str, scope: str) -> None:
        """Who may read it as a whole."""
        self._scopes[slab].add(scope)

    def add_damaged(self, slab: str) -> None:
        """The store does not hold it as its name says."""
        self._damaged.add(slab)

    def add_slice(self, content: str, slab: str) -> None:
        """The content lies in the slab."""
        if content not in self._gone and slab not in self._gone:
            self._inside[slab].add(content)
            self._slabs[content].add(slab)

    def add_whole(self, content: str) -> None:
        """The content has chunks of its own as well, none of them damaged."""
        self._whole.add(content)

    def knows(self, slab: str) -> bool:
        """Whether the slab was added."""
        return slab in self._sizes

    # --- what goes ---

    def going(self, contents: Collection[str]) -> list[str]:
        """The slabs that would go with these contents. Changes nothing."""
        leaving = frozenset(contents)
        touched = sorted({slab for content in leaving for slab in self._slabs.get(content, ()) if self.knows(slab)})
        dropped: set[str] = set()
        for slab in touched:
            staying = self._inside[slab] - leaving
            if not any(self._needs(content, slab, dropped) for content in staying):
                dropped.add(slab)
        return [slab for slab in touched if slab in dropped]

    def take(self, contents: Collection[str]) -> list[str]:
        """These contents go; returns the slabs that go with them."""
        dropped = self.going(contents)
        self._gone.update(contents, dropped)
        for content in contents:
            for slab in self._slabs.pop(content, ()):
                self._inside[slab].discard(content)
        for slab in dropped:
            for content in self._inside.pop(slab, ()):
                self._slabs[content].discard(slab)
        return dropped

    def size(self, slabs: Iterable[str]) -> int:
        """The bytes of these slabs together."""
        return sum(self._sizes[slab] for slab in slabs)

    def _needs(self, content: str, slab: str, dropped: AbstractSet[str]) -> bool:
        if content in self._whole:
            return False
        others = [self._scopes[other] for other in self._slabs[content] - self._damaged - dropped if other != slab]
        return not all(
            any(scope in readable or PUBLIC in readable for readable in others) for scope in self._scopes[slab]
        )


_RAW: Final = 32  # bytes of a raw digest


def split_digests(raw: bytes) -> list[bytes]:
    """The raw digests that a database keeps one after the other."""
    return [raw[start : start + _RAW] for start in range(0, len(raw), _RAW)]


def manifest_fault(digest: Digest, canonical: bytes) -> str | None:
    """What is wrong with a manifest's bytes, or None."""
    actual = digest_of(canonical)
    return None if actual == digest else f"its manifest has the name {actual}"


def content_fault(digest: Digest, size: int, chunks: bytes) -> str | None:
    """What is wrong with the record of a file, or None. ``chunks`` are raw digests, none where it lies in slabs.

    Where in a slab a file lies proves itself by the file's bytes alone, and is not asked here.
    """
    if not chunks:
        fits = size == 0 if digest == EMPTY else size > 0 and is_small(size)
        return None if fits else f"the record of a file of {size} bytes has no chunks"
    if size < 0 or len(chunks) != _RAW * chunk_count(size):
        return f"the record of a file of {size} bytes has {len(chunks)} bytes of chunk names"
    names = map(Digest.from_bytes, split_digests(chunks))
    return None if file_digest(size, names) == digest else "the chunks of a file's record do not make up the file"


@dataclass(frozen=True, slots=True)
class Piece:
    """``size`` bytes at ``offset`` of the object, called ``name``: bytes from ``start`` on of a content of ``content_size``.

    For a chunk that is the chunk itself; for a slab, each small file in it.
    """

    name: Digest
    offset: int
    size: int
    content: Digest
    content_size: int
    start: int


@dataclass(frozen=True, slots=True)
class Needed:
    """A damaged object: its name, size and pieces. A slab's may leave gaps, where files were that nobody needs any more.

    ``scopes`` are those who may read a slab; None says that it is no slab.
    """

    digest: Digest
    size: int
    pieces: tuple[Piece, ...]
    scopes: tuple[str, ...] | None = None

    @property
    def is_slab(self) -> bool:
        """Whether it holds small files, rather than being a piece of a large one."""
        return self.scopes is not None

    @property
    def seal(self) -> bytes:
        """What a slab ended in when it was packed; it is nobody's piece."""
        return seal_of(self.scopes[0]) if self.scopes is not None and len(self.scopes) == 1 else b""

    @property
    def whole(self) -> Piece:
        """The object itself, for those who may hold it under its own name."""
        first = self.pieces[0]
        return Piece(self.digest, 0, self.size, first.content, first.content_size, first.start)


def closed_up(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """The pieces in order with new offsets that leave no gaps."""
    placed: list[tuple[Piece, int]] = []
    offset = 0
    for piece in sorted(pieces, key=lambda one: one.offset):
        placed.append((piece, offset))
        offset += piece.size
    return placed


# manifests that everybody gave up, with what only they name · complete files that no manifest names · chunks of files that
# nobody went on with · files that came wrong · chunks that no row names · what was left half-written
Kind = Literal["manifests", "contents", "half_copied", "evidence", "chunks", "incoming"]
KINDS: Final[tuple[Kind, ...]] = ("manifests", "contents", "half_copied", "evidence", "chunks", "incoming")

TOMBSTONE_SECONDS: Final = 7 * 86400
GRACE_SECONDS: Final = 86400
EVIDENCE_SECONDS: Final = 30 * 86400
CLOCKS_SECONDS: Final = 60.0  # by which the clocks of workers may differ


def collectable_before(now: float, grace_seconds: float, oldest_at_work: float | None) -> float:
    """Only what was put, kept or recorded before this may be collected.

    A copy puts or keeps every chunk that it counts on, and nothing says so until its rows are written. So whatever happened
    since the oldest mirror that is being worked on began is left alone, however long it takes.
    """
    latest = now - grace_seconds
    return latest if oldest_at_work is None else min(latest, oldest_at_work - CLOCKS_SECONDS)
