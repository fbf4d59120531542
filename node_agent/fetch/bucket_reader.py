"""The last link of the chain: reads the mirror's bucket at signed addresses, or the mirror's data plane."""

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
from node_agent.fetch.locations import LocationLookup, Reading
from node_agent.fetch.peers import MIRROR, Clock, Peers, SourceDeadline, Waits

_BUCKET: Final = "bucket"

# Why the mirror's data plane is used instead of the bucket: the mirror gave no address · the bucket refused the second
# address, too · the object is missing · the bucket did not respond · the bucket is avoided after a recent failure
Reason = Literal["unlocated", "refused", "absent", "unreachable", "avoided"]


@dataclass(frozen=True)
class MirrorReader:
    """One unverified request to the mirror within its deadlines. Its outcome counts for all fills of this node."""

    http: HttpChunkReader
    peers: Peers
    waits: Waits
    stop: threading.Event
    on_bytes: Callable[[int], object]

    def read_into(self, chunk: PartialChunk) -> None:
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


class MirrorBucket:
    """This agent's access to the bucket. Shared by all readers; thread-safe.

    At most ``most`` requests are in flight, fewer when the bucket throttles. A bucket that did not respond is avoided
    for a while, like a peer. ``on_instead`` is called with the reason for each chunk read from the mirror's data plane.
    """

    def __init__(
        self,
        locations: LocationLookup,
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
        return self._slots.limit

    def claim(self) -> bool:
        """Whether a request may be sent now. The caller reports the outcome with ``answered`` or ``failed``."""
        with self._lock:
            return self._health.claim(_BUCKET, self._clock())

    def answered(self) -> None:
        with self._lock:
            self._health.succeeded(_BUCKET, self._clock())

    def failed(self) -> None:
        with self._lock:
            self._health.blame(_BUCKET, Fault.FAILED, self._clock())

    @contextmanager
    def slot(self, size: int, stop: threading.Event) -> Iterator[None]:
        """Hold a slot for one request of ``size`` bytes. Raises ``CanceledError`` if ``stop`` is set while waiting."""
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
    """Reads the bucket; ``mirror`` if the bucket cannot be read, ``looking`` if it lacks the chunk.

    A busy bucket fails the attempt, to be retried: the mirror would read the same bucket. So does an answer that breaks
    off; the next attempt resumes there.
    """

    bucket: MirrorBucket
    reading: Reading
    mirror: ChunkReader
    looking: ChunkReader
    peers: Peers
    waits: Waits
    stop: threading.Event
    on_bytes: Callable[[int], object]

    def read_into(self, chunk: PartialChunk) -> None:
        """Read the missing bytes, without verifying them. A refused address is requested anew, once."""
        reason = self._try(self._location(chunk.digest), chunk)
        if reason == "refused":
            reason = self._try(self._location(chunk.digest), chunk)
            if reason in ("refused", "avoided"):  # avoided: the bucket was on trial, and failed it
                self.bucket.failed()
        if reason is not None:
            self.bucket.on_instead(reason)
            (self.looking if reason == "absent" else self.mirror).read_into(chunk)

    def _location(self, digest: Digest) -> Location | None:
        return self.bucket.locations.of(self.reading, digest, self.stop)

    def _try(self, location: Location | None, chunk: PartialChunk) -> Reason | None:
        """Why another source is needed; None when the chunk is read."""
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
