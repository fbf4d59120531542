"""A mirror's store: chunks under their digests, whose rows in the database say which of them are needed."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol, runtime_checkable

from bdn.core.chunk import Buffer, Digest
from bdn.core.errors import Fact, StoreUnavailableError
from bdn.core.source.upstream import Location

DELETE_SENT_SECONDS: Final = 200.0  # after a deletion began, no DELETE is sent


class ChunkStore(Protocol):
    """Where mirrored chunks are. Blocking; called from byte threads."""

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Make the chunk durable under its name, in place of what is there. Nothing partial is ever visible.

        ``writer`` is the organisation that sends it: its requests to the store alternate with requests of other organisations.
        """

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """The chunk as a seekable file, which the caller closes. ``NotFoundError`` when it is not there.

        ``reader`` is the organisation that the chunk is sent to. The file may take memory for as long as the client reads, so
        that an organisation has a share of it. ``StoreUnavailableError`` at once while it is at its share: the threads that
        send chunks alone release memory, and must not wait for it.
        """


class StoredChunk(NamedTuple):
    """A chunk that the store has, whatever the database says of it."""

    digest: Digest
    size: int


class StoreDisk(NamedTuple):
    """The file system of a store: free bytes, all bytes, its device, and a path on it."""

    free: int
    size: int
    device: int
    path: str


class NotDeletedError(StoreUnavailableError):
    """``left`` may still be there, and may go later: none of them may be put before ``DELETE_SECONDS`` have passed."""

    left: frozenset[Digest]

    def details(self) -> dict[str, Fact]:
        """Without the chunks: they may be hundreds."""
        return {"reason": self.reason}


class MirrorStore(ChunkStore, Protocol):
    """A store out of which a mirror collects, and which it scrubs."""

    def check(self) -> None:
        """Raise ``StoreUnavailableError`` when nothing in the store can be reached."""

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        """Remove these chunks; absent ones are fine. An open chunk can be read to its end. All are durably gone on return.

        The caller has ruled out that one of them is put meanwhile. ``began`` is when it began to do so, by ``since_boot``; None: now.
        A caller that was suspended in between deletes nothing: another one may have deleted these chunks, and put them anew.

        Raises ``NotDeletedError`` when some may not be gone; any other ``StoreUnavailableError`` says the same of all.
        """

    def held(self, digests: Iterable[Digest]) -> dict[Digest, int]:
        """Those of these chunks that are there, with their sizes; their bytes may be wrong."""

    def listed(self) -> Iterator[StoredChunk]:
        """All chunks that are there, in the order of their digests. One that comes or goes meanwhile may be missed."""

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Remove what was left half-written and last changed before then. How many there are, and their bytes."""

    def fault(self, digest: Digest) -> str | None:
        """What is wrong with the chunk's object, or None. It is read past caches. ``BdnError``: cannot be found out now."""

    def set_aside(self, digest: Digest) -> bool:
        """Keep a wrong chunk as evidence. Its object stays under its name until it is put again, or deleted.

        False: it is absent, or right after all.
        """

    def evidence(self) -> int:
        """How many wrong chunks are kept."""

    def disk(self) -> StoreDisk | None:
        """Its disk, if it is this machine's."""

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """The id of the database that the store belongs to, or None.

        ``new`` is written durably where the store has no owner, or with ``replace`` whatever its owner is; of several that are written
        at once, one stays and is returned. The owner is not a chunk: it is not listed, deleted or copied.
        """

    def close(self) -> None:
        """Let go of what is open for it."""


@runtime_checkable
class LocatableStore(Protocol):
    """A store whose chunks others may read by themselves. Blocking; safe for several threads."""

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        """Where each of these chunks can be read with GET, whole or in ranges, until its location expires; in their order.

        Nothing is asked for them: one that is not there is located, too, and its reader gets 404. What is read there is compared
        with its digest by who reads it. ``StoreUnavailableError``: credentials that ended cannot be renewed now.
        """


# --- who may use what an upstream said ---

PUBLIC: Final = "public"  # everybody
_OWNED: Final = "organisation:"
_TEAM: Final = ":"  # not a sign of an organisation's name


def reader_of(organisation: str, team: str | None = None) -> str:
    """An organisation, which reads what all its teams mirrored, or one team of it, which reads its own."""
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


# --- what a collection removes ---

# evicted manifests, with what only they name · chunks that no set refers to · files that came wrong · what was left half-written
Kind = Literal["manifests", "chunks", "evidence", "incoming"]
KINDS: Final[tuple[Kind, ...]] = ("manifests", "chunks", "evidence", "incoming")

TOMBSTONE_SECONDS: Final = 7 * 86400
GRACE_SECONDS: Final = 86400
EVIDENCE_SECONDS: Final = 30 * 86400
