"""Where this node's chunks come from: one chain of readers, put together in ``ReaderChain``.

    for a fill    retrying → local → peers → single flight → verifying → mirror
    for a peer    (single flight → cluster tier) → retrying → verifying → mirror

Single flight stands behind the peers, not before them. For a moment two nodes may know of different members, and each
asks the other for the same chunk: if a peer's request waited for a fill that asks a peer, both would wait for ever. Who reads
from the mirror waits for nobody. For the same reason an owner obtains a chunk for its peers from the mirror alone.
The fill's retry stands outermost, because peers may have the chunk by the next attempt. The owner's stands inside of the
single flight, because the peers that wait for its one read have other sources to go to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol
from urllib.parse import urlsplit, urlunsplit

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk, RetryingReader, VerifyingReader
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.operation_schema import Tier
from node_agent.fetch.deadlines import SourceDeadline, Waits
from node_agent.fetch.fill_context import FillContext
from node_agent.fetch.peers import MIRROR, Peers
from node_agent.fetch.peers_reader import PeersReader
from node_agent.fetch.reads_in_progress import ReadsInProgress

_WAIT_SECONDS: Final = 60.0  # for another reader on this node, before looking again


class LocalChunks(Protocol):
    """What this node holds."""

    def holds(self, digest: Digest) -> bool:
        """Whether the chunk seems to be here."""
        ...

    def read_held(self, digest: Digest, buffer: memoryview) -> Tier | None:
        """Fill ``buffer`` with the chunk, verified, and say which tier holds it; None, and anything in the buffer, otherwise."""
        ...


@dataclass(frozen=True)
class ReaderChain:
    """Makes the chains. ``on_mismatch`` counts chunks that arrived with the wrong content.

    ``reads`` are the reads from the mirror that are going on, those of fills and those for peers.
    """

    to_mirror: ConnectionPool
    to_peers: ConnectionPool
    held: LocalChunks
    reads: ReadsInProgress[Digest]
    peers: Peers
    policy: RetryPolicy
    waits: Waits
    on_mismatch: Callable[[], None]

    def of_fill(self, base_url: str, context: FillContext, stop: threading.Event) -> ChunkReader:
        """For chunks that the mirror serves at ``base_url``; it stops trying when ``stop`` is set."""
        mirror = self._mirror(base_url, context.bearer, stop)
        shared = SingleFlightReader(mirror, self.held, self.reads, stop)
        ring = PeersReader(shared, self.to_peers, self.peers, context, stop, self.waits, self._mismatched)
        return RetryingReader(LocalReader(ring, self.held), self.policy, stop, context.budget.retry)

    def of_owner(self, base_url: str, bearer: str, stop: threading.Event) -> ChunkReader:
        """For what this node obtains for its peers. ``bearer`` is the grant of the one that asks."""
        return RetryingReader(self._mirror(base_url, bearer, stop), self.policy, stop)

    def _mirror(self, base_url: str, bearer: str, stop: threading.Event) -> ChunkReader:
        http = HttpChunkReader(self.to_mirror, base_url, bearer)
        once = MirrorReader(http, self.peers, self.waits, stop)
        again = replace(once, http=replace(http, is_suspect=True))
        return VerifyingReader(once, again, self._mismatched)

    def _mismatched(self, chunk: PartialChunk) -> None:
        self.on_mismatch()
        self.peers.sent_wrong(chunk.senders)


@dataclass(frozen=True)
class LocalReader:
    """What this node holds is read here, and everything else from the inner reader."""

    inner: ChunkReader
    held: LocalChunks

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the chunk, from one or the other."""
        if not _found_here(self.held, chunk):
            self.inner.read_into(chunk)


@dataclass(frozen=True)
class SingleFlightReader:
    """One thread of this node reads a chunk with the inner reader; the others wait, and find it here then."""

    inner: ChunkReader
    held: LocalChunks
    reads: ReadsInProgress[Digest]
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
            self.reads.wait(chunk.digest, _WAIT_SECONDS, self.stop)
            if self.stop.is_set():
                raise CanceledError("the transfer")
            if _found_here(self.held, chunk):
                return


@dataclass(frozen=True)
class MirrorReader:
    """One request to the mirror, within its deadlines. How it went is remembered for all fills of this node."""

    http: HttpChunkReader
    peers: Peers
    waits: Waits
    stop: threading.Event

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring what is missing, not verified."""
        missing = chunk.missing
        deadline = SourceDeadline.of_mirror(missing, self.stop, self.peers.clock, self.waits)
        chunk.begin_source("mirror", MIRROR)
        try:
            replace(self.http, deadline=deadline).read_into(chunk)
        except BdnError as error:
            if error.transient:
                self.peers.blame_mirror()
            raise
        self.peers.read(missing, deadline.taken)


def _found_here(held: LocalChunks, chunk: PartialChunk) -> bool:
    """Whether the chunk was read from this node. What came of it from elsewhere is kept, unless it seems to be here."""
    if chunk.done:
        if not held.holds(chunk.digest):
            return False
        chunk.restart()  # reading overwrites the buffer, also where what is held turns out to be damaged
    tier = held.read_held(chunk.digest, chunk.buffer)
    if tier is not None:
        chunk.found(tier)
    return tier is not None


def chunk_base(api_url: str, data_port: int | None) -> str:
    """The address of a service's data plane: its own host with another port, or its own address."""
    if data_port is None:
        return api_url
    parts = urlsplit(api_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{data_port}", "", "", ""))
