"""The sources of this node's chunks: one chain of readers, assembled in ``ReaderChain``.

    for a fill    retrying → what is here, and peers → single flight → verifying → (bucket →) mirror
    for a peer    (single flight → cluster tier) → retrying → verifying → (bucket →) mirror

The mirror's bucket comes before the mirror if the mirror delivers directly (``bucket_reader.py``); the rules for the
mirror hold for both.

Single flight comes after the peers, not before. For a moment two nodes may know different members, and each requests
the same chunk from the other: if a peer's request waited for a fill that requests the chunk from a peer, both would
deadlock. A read from the mirror waits for no other node. For the same reason an owner obtains chunks for its peers from
the mirror alone.

The fill's retry is outermost, because peers may have the chunk by the next attempt. The owner's retry is inside the
single flight, because the peers that wait for its one read have other sources.
"""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.client import DataPlane, at_port
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk, RetryingReader, VerifyingReader
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.location_schema import Delivery
from node_agent.cache.held_chunks import HeldChunks
from node_agent.fetch.bucket_reader import BucketReader, MirrorBucket, MirrorReader
from node_agent.fetch.fill_context import FillContext
from node_agent.fetch.locations import Reading
from node_agent.fetch.peers import MIRROR, Alternative, LateError, Peers, SourceDeadline, Waits
from node_agent.fetch.reads_in_progress import ReadsInProgress

_OWNER_OUTAGE_SECONDS: Final = 5.0  # short: peers that wait for their owner have other sources, and retry
_WAIT_SECONDS: Final = 60.0  # for another reader on this node, before checking again


class MirrorPlane:
    """How to read chunks from the mirror, from its last answer to a request for a root. Thread-safe."""

    def __init__(self) -> None:
        self.current = DataPlane()
        self.is_known = False

    def tell(self, plane: DataPlane) -> None:
        self.current, self.is_known = plane, True


@dataclass(frozen=True)
class ReaderChain:
    """Creates the chains. ``on_mismatch`` counts chunks that arrived with wrong content.

    ``on_bytes`` is called with the delivery and size of bytes that did not come from a peer. ``reads`` are all reads
    from the mirror in progress, of fills and for peers.
    """

    mirror_url: str
    to_mirror: ConnectionPool
    to_peers: ConnectionPool
    held: HeldChunks
    peers: Peers
    policy: RetryPolicy
    waits: Waits
    bucket: MirrorBucket
    on_mismatch: Callable[[], None]
    on_bytes: Callable[[Delivery, int], object] = lambda *_: None
    reads: ReadsInProgress = field(default_factory=ReadsInProgress)
    plane: MirrorPlane = field(default_factory=MirrorPlane)

    def of_fill(self, context: FillContext, stop: threading.Event) -> ChunkReader:
        """The chain of a fill. Retries end when ``stop`` is set."""
        mirror = self._mirror(Reading(context.manifest, context.bearer, context.ahead), stop)
        shared = SingleFlightReader(mirror, self.held, self.reads, stop)
        ring = PeersReader(shared, self.to_peers, self.peers, context, stop, self.waits, self._mismatched)
        return RetryingReader(ring, self.policy, stop, context.budget.retry, context.budget.arrived)

    def of_owner(self, reading: Reading, stop: threading.Event) -> ChunkReader:
        """The chain for chunks obtained for peers, with the grant of the requesting peer."""
        return RetryingReader(self._mirror(reading, stop), owner_policy(self.policy), stop)

    def _mirror(self, reading: Reading, stop: threading.Event) -> ChunkReader:
        plane = self.plane.current
        http = HttpChunkReader(self.to_mirror, at_port(self.mirror_url, plane.port), reading.bearer)
        mirror = MirrorReader(http, self.peers, self.waits, stop, partial(self.on_bytes, "proxy"))
        looking = replace(mirror, http=replace(http, is_suspect=True))
        if plane.delivery == "proxy":
            return VerifyingReader(mirror, looking, self._mismatched)
        bucket = BucketReader(
            self.bucket, reading, mirror, looking, self.peers, self.waits, stop, partial(self.on_bytes, "direct")
        )
        return VerifyingReader(bucket, looking, self._mismatched)

    def _mismatched(self, chunk: PartialChunk) -> None:
        self.on_mismatch()
        self.peers.sent_wrong(chunk.senders)


def owner_policy(policy: RetryPolicy) -> RetryPolicy:
    """Retry policy for reads from the mirror on behalf of a peer."""
    return replace(policy, outage_seconds=min(policy.outage_seconds, _OWNER_OUTAGE_SECONDS))


@dataclass(frozen=True)
class SingleFlightReader:
    """One thread of this node reads a chunk with the inner reader; other threads wait, and then find the chunk here."""

    inner: ChunkReader
    held: HeldChunks
    reads: ReadsInProgress
    stop: threading.Event

    def read_into(self, chunk: PartialChunk) -> None:
        """Obtain the chunk. A chunk from the inner reader is stored before the waiting threads check for it."""
        while True:
            with self.reads.lead(chunk.digest) as is_leader:
                if is_leader:
                    # The chunk may have arrived between the last check and the lead.
                    if not _found_here(self.held, chunk):
                        self.inner.read_into(chunk)
                        chunk.store()
                    return
            chunk.at("same_chunk")
            self.reads.wait(chunk.digest, _WAIT_SECONDS, self.stop)
            if self.stop.is_set():
                raise CanceledError("the transfer")
            if _found_here(self.held, chunk):
                return


def _found_here(held: HeldChunks, chunk: PartialChunk) -> bool:
    """Whether the chunk was read from this node. Bytes from elsewhere are kept unless it seems to be here."""
    if chunk.done:
        if not held.holds(chunk.digest):
            return False
        chunk.restart()  # the read overwrites the buffer, even if the held chunk turns out to be damaged
    tier = held.read_held(chunk.digest, chunk.buffer)
    if tier is not None:
        chunk.found(tier)
    return tier is not None


@dataclass(frozen=True)
class PeersReader:
    """Reads from this node, then peers, then the inner reader. Each peer resumes where the one before broke off.

    ``connections`` are for peers, with shorter timeouts than the mirror's, which has no substitute. ``on_mismatch``
    gets a chunk with wrong content before its bytes are dropped.
    """

    inner: SingleFlightReader
    connections: ConnectionPool
    peers: Peers
    context: FillContext
    stop: threading.Event
    waits: Waits
    on_mismatch: Callable[[PartialChunk], None]

    def read_into(self, chunk: PartialChunk) -> None:
        """Obtain the verified chunk, from one source after the other."""
        if _found_here(self.inner.held, chunk):
            return
        routing = self.context.routing
        for peer, is_owner in routing.sources(chunk.digest, self.peers.is_avoided):
            if self._ask(peer, chunk, is_owner=is_owner):
                return
        if self.peers.is_at_fault(MIRROR) and self._ask_everybody(chunk):
            return
        try:
            self.inner.read_into(chunk)
        except BdnError as error:
            if not error.transient or self.stop.is_set() or not self._ask_everybody(chunk):
                raise

    def _ask_everybody(self, chunk: PartialChunk) -> bool:
        """Request the chunk from all members: a member that joined late owns chunks that only older members have."""
        for peer in self.context.routing.everybody(chunk.digest):
            if not self.peers.is_avoided(peer) and self._ask(peer, chunk):
                return True
        return False

    def _ask(self, peer: str, chunk: PartialChunk, *, is_owner: bool = False) -> bool:
        """Request the missing bytes from a peer, which obtains the chunk as its owner or serves only what it holds.

        Returns False if the next source should continue with the bytes received so far.
        """
        if not is_owner:
            return self._request(peer, chunk, is_owner=False)
        chunk.at("owner")
        with self.peers.place(peer, self.stop) as is_ours:
            return is_ours and self._request(peer, chunk, is_owner=True)

    def _request(self, peer: str, chunk: PartialChunk, *, is_owner: bool) -> bool:
        address = self.peers.address(peer)
        if address is None or not self.peers.claim(peer):
            return False
        sent, missing, manifest = time.monotonic(), chunk.missing, self.context.manifest if is_owner else None
        deadline = self._deadline(peer, missing)
        chunk.begin_source("cluster", peer)
        try:
            with self.peers.waited_for(peer, deadline) if is_owner else nullcontext():
                HttpChunkReader(self.connections, address, self.context.bearer, manifest, deadline).read_into(chunk)
            chunk.check()
        except LateError as late:
            self._leave(peer, late, deadline, sent)
        except ChecksumMismatchError:
            if chunk.senders == [peer]:
                self._make_look(peer, address, chunk)
            self.on_mismatch(chunk)
            chunk.restart()
        except CanceledError:
            raise
        except BdnError as error:
            if is_owner or not isinstance(error, NotFoundError):  # a peer that is not the owner need not hold it
                self.peers.failed(peer)
                if not self.context.budget.retry(sent):
                    raise
        else:
            self.peers.served(peer, missing, deadline.taken)
            return True
        return False

    def _make_look(self, peer: str, address: str, chunk: PartialChunk) -> None:
        """Make the peer verify what it holds before it serves the chunk again. Its answer does not matter."""
        reader = HttpChunkReader(
            self.connections, address, self.context.bearer, deadline=self._deadline(peer, 1), is_suspect=True
        )
        probe = PartialChunk(chunk.digest, chunk.buffer)
        probe.done = max(0, len(chunk.buffer) - 1)  # requests one byte
        with suppress(BdnError, LateError):
            reader.read_into(probe)

    def _leave(self, peer: str, late: LateError, deadline: SourceDeadline, sent: float) -> None:
        if not deadline.has_begun:
            self.peers.left(peer)
        if late.is_fault:
            self.peers.late(peer, has_begun=deadline.has_begun)
        if late.failure and not self.context.budget.retry(sent):
            raise StoreUnavailableError(late.failure) from None

    def _deadline(self, peer: str, size: int) -> SourceDeadline:

        def may_leave(missing: int) -> bool:
            if self.context.budget.hedge(missing):
                return True
            self.peers.late(peer, has_begun=deadline.has_begun)  # at least, new requests go elsewhere
            return False

        limits, is_at_fault = partial(self.peers.limits, peer, size), partial(self.peers.is_at_fault, peer)
        alternative = Alternative(limits, may_leave, is_at_fault, self.context.is_ending)
        deadline = SourceDeadline.of_peer(size, self.stop, alternative, self.peers.clock, self.waits)
        return deadline
