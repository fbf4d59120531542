"""The last link of the chain: the bucket of the mirror's store, at addresses that the mirror signs, or the mirror's data plane."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CanceledError, NotFoundError, StoreUnavailableError
from bdn.core.pace.limit import Outcome, Pace, PaceRule
from bdn.core.ring.peer_health import Fault, PeerHealth
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import SlotRequest, Slots
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk, WrongLengthError
from bdn.transfer.http_chunks import AddressRefusedError, BucketBusyError, HttpChunkReader, LocatedChunkReader
from node_agent.fetch.locations import ChunkLocations, Reading
from node_agent.fetch.peers import MIRROR, Clock, Peers, SourceDeadline, Waits

_BUCKET: Final = "bucket"

# Why the mirror's data plane is asked although the bucket should be: the mirror told no address · the bucket did not take the
# second one either · it has no such object · it did not answer · it did not lately
Reason = Literal["unlocated", "refused", "absent", "unreachable", "avoided"]
REASONS: Final[tuple[Reason, ...]] = ("unlocated", "refused", "absent", "unreachable", "avoided")


@dataclass(frozen=True)
class MirrorReader:
    """One request to the mirror, within its deadlines. How it went is remembered for all fills of this node."""

    http: HttpChunkReader
    peers: Peers
    waits: Waits
    stop: threading.Event
    on_bytes: Callable[[int], object]

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring what is missing, not verified."""
        missing = chunk.missing
        deadline = SourceDeadline.of_mirror(missing, self.stop, self.peers.clock, self.waits)
        chunk.begin_source("mirror", MIRROR)
        try:
            replace(self.http, deadline=deadline).read_into(chunk)
        except BdnError as error:
            if error.transient:
                self.peers.failed(MIRROR)
            raise
        finally:
            self.on_bytes(missing - chunk.missing)
        self.peers.read(missing, deadline.taken)


class Bucket:
    """The bucket as this agent reads it. Shared by all readers, and safe for threads.

    At most ``most`` requests are in flight, and fewer once the bucket asks for that. One that did not answer is avoided for a
    while, as a peer is. ``on_instead`` is told why a chunk is asked of the mirror's data plane.
    """

    def __init__(
        self,
        locations: ChunkLocations,
        connections: ConnectionPool,
        most: int,
        clock: Clock,
        on_instead: Callable[[Reason], object] = lambda _: None,
    ) -> None:
        self.locations = locations
        self.connections = connections
        self.on_instead = on_instead
        self._slots = Slots(Pace(PaceRule(most, first=most), clock()), clock)
        self._clock = clock
        self._health = PeerHealth()
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """How many requests may be in flight now."""
        return self._slots.limit

    def claim(self) -> bool:
        """Whether it may be asked now. The end is to be reported, by ``answered`` or ``failed``."""
        with self._lock:
            return self._health.claim(_BUCKET, self._clock())

    def answered(self) -> None:
        """It is there."""
        with self._lock:
            self._health.succeeded(_BUCKET, self._clock())

    def failed(self) -> None:
        """This node gets nothing from it."""
        with self._lock:
            self._health.blame(_BUCKET, Fault.FAILED, self._clock())

    @contextmanager
    def slot(self, size: int, stop: threading.Event) -> Iterator[None]:
        """The right to one request for ``size`` bytes. Waits while too many are in flight, until ``stop``: ``CanceledError``."""
        turn, outcome = SlotRequest(size), Outcome.ANSWERED
        if not self._slots.take(turn, stop):
            raise CanceledError("the transfer")
        try:
            yield
            outcome = Outcome.ARRIVED
        except BucketBusyError:
            outcome = Outcome.REFUSED
            raise
        except StoreUnavailableError as error:
            if not isinstance(error, AddressRefusedError):
                outcome = Outcome.FAILED
            raise
        finally:
            self._slots.give_back(turn, outcome)


@dataclass(frozen=True)
class BucketReader:
    """The bucket, and instead of it ``mirror`` where the bucket cannot be read; ``looking`` where it lacks the chunk.

    A busy bucket is not spared by asking the mirror, which reads the same one: that fails, to be tried again. So does an answer
    that breaks off, from where the next attempt goes on.
    """

    bucket: Bucket
    reading: Reading
    mirror: ChunkReader
    looking: ChunkReader
    peers: Peers
    waits: Waits
    stop: threading.Event
    on_bytes: Callable[[int], object]

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring what is missing, not verified. An address that is refused is asked for anew, once."""
        reason = self._try(self._location(chunk.digest), chunk)
        if reason == "refused":
            reason = self._try(self._location(chunk.digest), chunk)
            if reason in ("refused", "avoided"):  # the latter: it was on trial, and did not stand it
                self.bucket.failed()
        if reason is not None:
            self.bucket.on_instead(reason)
            (self.looking if reason == "absent" else self.mirror).read_into(chunk)

    def _location(self, digest: Digest) -> Location | None:
        return self.bucket.locations.of(self.reading, digest, self.stop)

    def _try(self, location: Location | None, chunk: PartialChunk) -> Reason | None:
        """Why somebody else is to be asked; None when the chunk is there."""
        if location is None:
            return "unlocated"
        if not self.bucket.claim():
            return "avoided"
        before = chunk.missing
        try:
            self._read(location, chunk)
        except AddressRefusedError:
            self.bucket.locations.forget(self.reading, chunk.digest, location)
            return "refused"
        except NotFoundError:
            self.bucket.answered()
            return "absent"
        except (WrongLengthError, BucketBusyError):
            self.bucket.answered()
            self.peers.failed(MIRROR)
            raise
        except StoreUnavailableError:
            if chunk.missing < before:
                self.peers.failed(MIRROR)
                raise
            self.bucket.failed()
            return "unreachable"
        self.bucket.answered()
        self.bucket.locations.forget(self.reading, chunk.digest, location)
        return None

    def _read(self, location: Location, chunk: PartialChunk) -> None:
        missing = chunk.missing
        with self.bucket.slot(missing, self.stop):
            deadline = SourceDeadline.of_mirror(missing, self.stop, self.peers.clock, self.waits)
            chunk.begin_source("mirror", MIRROR)
            try:
                LocatedChunkReader(self.bucket.connections, location, deadline).read_into(chunk)
            finally:
                self.on_bytes(missing - chunk.missing)
        self.peers.read(missing, deadline.taken)
