"""The mirror's chunk store as a Protocol: chunks by digest, whose database rows say which chunks are needed."""

from collections.abc import Collection, Iterator, Sequence
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol, runtime_checkable

from bdn.core.chunk import Buffer, Digest
from bdn.core.errors import Fact, StoreUnavailableError
from bdn.core.source.upstream import Location

DELETE_SENT_SECONDS: Final = 200.0  # the latest DELETE after a deletion began


class ChunkStore(Protocol):
    """Storage of mirrored chunks. Blocking; called from byte threads."""

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Store the chunk durably and atomically, replacing an existing object.

        ``writer`` is the sending organisation; the store serves organisations in turn.
        """

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """Open the chunk as a seekable file, which the caller closes. Raises ``NotFoundError``.

        ``reader`` is the receiving organisation. The file may occupy memory for as long as the client reads, so each
        organisation has a share of that memory. An organisation at its share gets ``StoreUnavailableError`` at once:
        only the threads that send chunks release memory, so they must not wait for it.
        """


class StoredObject(NamedTuple):
    """A chunk in the store, whether or not the database knows it."""

    digest: Digest
    size: int


class StoreDisk(NamedTuple):
    """The file system of a store: free and total bytes, device, and a path on it."""

    free: int
    size: int
    device: int
    path: str


class NotDeletedError(StoreUnavailableError):
    """Chunks in ``left`` may still exist, and may vanish later.

    The mirror must not put any of them before ``DELETE_SECONDS`` have passed.
    """

    left: frozenset[Digest]

    def details(self) -> dict[str, Fact]:
        """Omits the chunks: there may be hundreds."""
        return {"reason": self.reason}


class MirrorStore(ChunkStore, Protocol):
    """A store that a mirror collects and scrubs."""

    def check(self) -> None:
        """Raise ``StoreUnavailableError`` when the store is unreachable."""

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        """Delete chunks durably; absent chunks are fine. A chunk opened earlier can be read to its end.

        The caller guarantees that none of them is put meanwhile. ``began`` is the start of that guarantee, by
        ``since_boot``; None: now. A caller that was suspended in between deletes nothing: another process may have
        deleted these chunks and put them anew.

        Raises ``NotDeletedError`` when some may still exist; any other ``StoreUnavailableError`` means that all may.
        """

    def listed(self) -> Iterator[StoredObject]:
        """All chunks, in digest order. Chunks that are put or deleted meanwhile may be missed."""

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove partial writes last changed before ``before``. Returns their number and bytes."""

    def fault(self, digest: Digest) -> str | None:
        """Describe the damage of a chunk's object, or None. Reads past caches. ``BdnError``: cannot be checked now."""

    def set_aside(self, digest: Digest) -> bool:
        """Save a damaged chunk as evidence. Its object stays under its name until it is put again or deleted.

        Returns:
            False: the chunk is absent, or correct after all.
        """

    def evidence(self) -> int:
        """The number of damaged chunks saved as evidence."""

    def disk(self) -> StoreDisk | None: ...

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """Return the id of the database that owns the store, or None.

        ``new`` is stored durably if the store has no owner, or, with ``replace``, in any case. Of several concurrent
        writes one wins and is returned. The owner is not a chunk: it is not listed, deleted or copied.
        """

    def close(self) -> None: ...


@runtime_checkable
class LocatableStore(Protocol):
    """A store whose chunks agents may read directly. Blocking; thread-safe."""

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        """Locations for GET, whole or in ranges, until they expire; in the order of ``digests``.

        Sends no request: a missing chunk is located, too, and its reader gets 404. The reader verifies the bytes
        against the digest. Raises ``StoreUnavailableError`` when expired credentials cannot be renewed now.
        """


# --- scopes: which readers may use an upstream's identities ---

PUBLIC: Final = "public"  # all organisations
_OWNED: Final = "organisation:"
_TEAM: Final = ":"  # cannot occur in an organisation's name


def reader_of(organisation: str, team: str | None = None) -> str:
    """An organisation, which reads what all its teams mirrored, or one team, which reads its own."""
    return f"{organisation}{_TEAM}{team}" if team else organisation


def organisation_of(reader: str) -> str:
    return reader.partition(_TEAM)[0]


def team_of(reader: str) -> str | None:
    """The team of a reader; None for a whole organisation."""
    return reader.partition(_TEAM)[2] or None


def scope_of(reader: str) -> str:
    """The scope of content that needs a reader's credentials.

    An organisation's scope is a prefix of its teams' scopes.
    """
    return f"{_OWNED}{reader}"


# --- what a collection removes ---

# evicted manifests with the chunks that only they name · chunks without references · damaged files saved as evidence ·
# partial writes
Kind = Literal["manifests", "chunks", "evidence", "incoming"]
KINDS: Final[tuple[Kind, ...]] = ("manifests", "chunks", "evidence", "incoming")

TOMBSTONE_SECONDS: Final = 7 * 86400
GRACE_SECONDS: Final = 86400
EVIDENCE_SECONDS: Final = 30 * 86400
