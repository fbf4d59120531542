"""The ring put together for one fill, as a stack of readers; the only place that knows how deep the stack is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.ports import ChunkReader
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.transfer.retrying import Retrier, RetryingReader
from bdn.transfer.verifying import VerifyingReader
from node_agent.fetch.deadlines import SourcePatience, Waits
from node_agent.fetch.origin_reads import OriginReads
from node_agent.fetch.peers import Peers
from node_agent.fetch.ring_reader import Bearings, Local, RingSupply
from node_agent.fetch.supply import Supply


@dataclass(frozen=True)
class Supplier:
    """Opens supplies. ``on_mismatch`` counts chunks that arrived with the wrong content.

    Peers have connections of their own, which are given up sooner: for the mirror there is no substitute.
    """

    to_mirror: ConnectionPool
    to_peers: ConnectionPool
    local: Local
    reads: OriginReads
    peers: Peers
    policy: RetryPolicy
    on_mismatch: Callable[[], None]
    waits: Waits

    def open(self, base_url: str, bearings: Bearings, stop: threading.Event) -> Supply:
        """A supply of chunks that the mirror serves at ``base_url``; it stops trying when ``stop`` is set."""
        return RingSupply(
            self._mirror(base_url, bearings.bearer, stop),
            self.local,
            self.reads,
            self.peers,
            self.to_peers,
            bearings,
            stop,
            self.policy,
            self.on_mismatch,
            self.waits,
        )

    def mirror(self, base_url: str, bearer: str, stop: threading.Event) -> ChunkReader:
        """The mirror alone, for what this node obtains for its peers. ``bearer`` is the grant."""
        mirror = self._mirror(base_url, bearer, stop)  # one request, one answer
        verified = self._verified(mirror)  # believed only when it hashes to its name
        again = self._verified(replace(mirror, is_suspect=True))
        return RetryingReader(verified, Retrier(self.policy, stop), again)  # what may pass is tried again

    def _verified(self, mirror: HttpChunkReader) -> ChunkReader:
        return CountingReader(VerifyingReader(mirror), self.on_mismatch)

    def _mirror(self, base_url: str, bearer: str, stop: threading.Event) -> HttpChunkReader:
        patience = partial(SourcePatience.with_mirror, stop=stop, waits=self.waits)
        return HttpChunkReader(self.to_mirror, base_url, bearer, patience=patience)


@dataclass(frozen=True)
class CountingReader:
    """Wraps a verifying reader and counts its refusals: a rising figure is a failing disk, wire or peer."""

    inner: ChunkReader
    on_mismatch: Callable[[], None]

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """As the inner reader."""
        try:
            self.inner.read_into(digest, buffer)
        except ChecksumMismatchError:
            self.on_mismatch()
            raise
