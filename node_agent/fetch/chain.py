"""Where this node's chunks come from: one chain of readers, put together in ``ReaderChain``.

    for a fill    retrying → what is here, and peers → single flight → verifying → (bucket →) mirror
    for a peer    (single flight → cluster tier) → retrying → verifying → (bucket →) mirror

The mirror's bucket stands before the mirror where that says so (``bucket_reader.py``); what is said of the mirror holds for both.
Single flight stands behind the peers, not before them. For a moment two nodes may know of different members, and each
asks the other for the same chunk: if a peer's request waited for a fill that asks a peer, both would wait for ever. Who reads
from the mirror waits for nobody. For the same reason an owner obtains a chunk for its peers from the mirror alone.
The fill's retry stands outermost, because peers may have the chunk by the next attempt. The owner's stands inside of the
single flight, because the peers that wait for its one read have other sources to go to.
"""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.client import DataPlane
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk, RetryingReader, VerifyingReader
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.location_schema import Delivery
from node_agent.cache.held_chunks import HeldChunks
from node_agent.fetch.bucket_reader import Bucket, BucketReader, MirrorReader
from node_agent.fetch.fill_context import FillContext
from node_agent.fetch.locations import Reading
from node_agent.fetch.peers import MIRROR, Alternative, LateError, Peers, SourceDeadline, Waits
from node_agent.fetch.reads_in_progress import ReadsInProgress

_OWNER_OUTAGE_SECONDS: Final = 5.0  # peers that wait for their owner have other sources, and ask again
_WAIT_SECONDS: Final = 60.0  # for another reader on this node, before looking again


class MirrorPlane:
    """How chunks are read from the mirror, by its last answer to a request for a root. Safe for any thread."""

    def __init__(self) -> None:
        self.current = DataPlane()
        self.is_known = False

    def tell(self, plane: DataPlane) -> None:
        """The mirror has answered."""
        self.current, self.is_known = plane, True


@dataclass(frozen=True)
class ReaderChain:
    """Makes the chains. ``on_mismatch`` counts chunks that arrived with the wrong content.

    ``on_bytes`` is told how the bytes came that no peer sent. ``reads`` are the reads from the mirror that are going on, those
    of fills and those for peers.
    """

    mirror_url: str
    to_mirror: ConnectionPool
    to_peers: ConnectionPool
    held: HeldChunks
    peers: Peers
    policy: RetryPolicy
    waits: Waits
    bucket: Bucket
    on_mismatch: Callable[[], None]
    on_bytes: Callable[[Delivery, int], object] = lambda *_: None
    reads: ReadsInProgress = field(default_factory=ReadsInProgress)
    plane: MirrorPlane = field(default_factory=MirrorPlane)

    def of_fill(self, context: FillContext, stop: threading.Event) -> ChunkReader:
        """For a fill. It stops trying when ``stop`` is set."""
        mirror = self._mirror(Reading(context.manifest, context.bearer, context.ahead), stop)
        shared = SingleFlightReader(mirror, self.held, self.reads, stop)
        ring = PeersReader(shared, self.to_peers, self.peers, context, stop, self.waits, self._mismatched)
        return RetryingReader(ring, self.policy, stop, context.budget.retry, context.budget.arrived)

    def of_owner(self, reading: Reading, stop: threading.Event) -> ChunkReader:
        """For what this node obtains for its peers, with the grant of the one that asks."""
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
    """For what is read from the mirror because a peer asked."""
    return replace(policy, outage_seconds=min(policy.outage_seconds, _OWNER_OUTAGE_SECONDS))


def at_port(api_url: str, data_port: int | None) -> str:
    """The address of a service's data plane: its own host with another port, or its own address."""
    if data_port is None:
        return api_url
    parts = urlsplit(api_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{data_port}", "", "", ""))


@dataclass(frozen=True)
class SingleFlightReader:
    """One thread of this node reads a chunk with the inner reader; the others wait, and find it here then."""

    inner: ChunkReader
    held: HeldChunks
    reads: ReadsInProgress
    stop: threading.Event

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the chunk. One that the inner reader brings is stored before the others look for it."""
        while True:
            with self.reads.lead(chunk.digest) as is_leader:
                if is_leader:
                    # It may have landed between our last look and the lead.
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
    """Whether the chunk was read from this node. What came of it from elsewhere is kept, unless it seems to be here."""
    if chunk.done:
        if not held.holds(chunk.digest):
            return False
        chunk.restart()  # reading overwrites the buffer, also where what is held turns out to be damaged
    tier = held.read_held(chunk.digest, chunk.buffer)
    if tier is not None:
        chunk.found(tier)
    return tier is not None


@dataclass(frozen=True)
class PeersReader:
    """Looks on this node, then asks peers, then the inner reader. Each peer goes on where the one before it broke off.

    ``connections`` are those to peers, which are given up sooner: for the mirror there is no substitute. ``on_mismatch`` is
    told a chunk that came with the wrong content, before what came is dropped.
    """

    inner: SingleFlightReader
    connections: ConnectionPool
    peers: Peers
    context: FillContext
    stop: threading.Event
    waits: Waits
    on_mismatch: Callable[[PartialChunk], None]

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the right chunk, from one source after the other."""
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
        """From whoever holds it: a member that joined later than the others came to the chunk owns what only they have."""
        for peer in self.context.routing.everybody(chunk.digest):
            if not self.peers.is_avoided(peer) and self._ask(peer, chunk):
                return True
        return False

    def _ask(self, peer: str, chunk: PartialChunk, *, is_owner: bool = False) -> bool:
        """What is missing of the chunk from this peer, which obtains it as its owner or gives what it holds.

        False when the next source is to go on, with what is there by then.
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
            if is_owner or not isinstance(error, NotFoundError):  # else it does not hold what it need not
                self.peers.failed(peer)
                if not self.context.budget.retry(sent):
                    raise
        else:
            self.peers.served(peer, missing, deadline.taken)
            return True
        return False

    def _make_look(self, peer: str, address: str, chunk: PartialChunk) -> None:
        """Let it compare what it holds with its name, before it sends it to others. What it answers does not matter."""
        reader = HttpChunkReader(
            self.connections, address, self.context.bearer, deadline=self._deadline(peer, 1), is_suspect=True
        )
        probe = PartialChunk(chunk.digest, chunk.buffer)
        probe.done = max(0, len(chunk.buffer) - 1)  # no more than a byte is asked for
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
            self.peers.late(peer, has_begun=deadline.has_begun)  # new requests go elsewhere, at least
            return False

        limits, is_at_fault = partial(self.peers.limits, peer, size), partial(self.peers.is_at_fault, peer)
        alternative = Alternative(limits, may_leave, is_at_fault, self.context.is_ending)
        deadline = SourceDeadline.of_peer(size, self.stop, alternative, self.peers.clock, self.waits)
        return deadline
