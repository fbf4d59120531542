"""Chunks from peers: from their owner, from who has them from it, from the next owner; and else from the mirror.

While the mirror is out of reach, from whoever has them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, NotFoundError, StoreUnavailableError
from bdn.core.ring.peer_health import Fault
from bdn.core.ring.placement import HOLDERS_ASKED
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import ChunkReader, PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from node_agent.fetch.deadlines import Alternative, LateError, SourceDeadline, Waits
from node_agent.fetch.fill_context import FillContext
from node_agent.fetch.peers import Peers


@dataclass(frozen=True)
class PeersReader:
    """Asks peers before the inner reader. Each peer goes on where the one before it broke off.

    ``connections`` are those to peers, which are given up sooner: for the mirror there is no substitute. ``on_mismatch`` is
    told a chunk that came with the wrong content, before what came is dropped.
    """

    inner: ChunkReader
    connections: ConnectionPool
    peers: Peers
    context: FillContext
    stop: threading.Event
    waits: Waits
    on_mismatch: Callable[[PartialChunk], None]
    draw: Callable[[], float] = random.random

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the right chunk, from one peer after the other or from the inner reader."""
        for peer, manifest in self._sources(chunk.digest):
            if self._ask(peer, chunk, manifest):
                return
        if self.peers.is_mirror_avoided() and self._ask_everybody(chunk):
            return
        try:
            self.inner.read_into(chunk)
        except BdnError as error:
            if not error.transient or self.stop.is_set() or not self._ask_everybody(chunk):
                raise

    def _sources(self, digest: Digest) -> Iterator[tuple[str, Digest | None]]:
        """Peers, each with the manifest for which it is to obtain the chunk.

        Where the owner does not serve, the next owner would read the chunk from the mirror once more. So others are asked
        before it, only for what they hold: of those who asked the owner first, some by lot, that not all ask the same.
        """
        routing, manifest = self.context.routing, self.context.manifest
        owners = routing.peers(digest, self.peers.is_avoided)
        if owners and owners[0] == routing.owner(digest):
            yield owners[0], manifest
            owners = owners[1:]
        holders = [peer for peer in routing.ahead(digest) if not (peer in owners or self.peers.is_avoided(peer))]
        for _ in range(min(HOLDERS_ASKED, len(holders))):
            yield holders.pop(int(self.draw() * len(holders))), None
        for owner in owners:
            yield owner, manifest

    def _ask_everybody(self, chunk: PartialChunk) -> bool:
        """From whoever holds it: a member that joined later than the others came to the chunk owns what only they have."""
        for peer in self.context.routing.everybody(chunk.digest):
            if not self.peers.is_avoided(peer) and self._ask(peer, chunk, None):
                return True
        return False

    def _ask(self, peer: str, chunk: PartialChunk, manifest: Digest | None) -> bool:
        """What is missing of the chunk from this peer. False when the next source is to go on, with what is there by then."""
        address = self.peers.address(peer)
        if address is None or not self.peers.claim(peer):
            return False
        missing = chunk.missing
        deadline = self._deadline(peer, missing)
        chunk.begin_source("cluster", peer)
        try:
            HttpChunkReader(self.connections, address, self.context.bearer, manifest, deadline).read_into(chunk)
            chunk.check()
        except LateError as late:
            self._leave(peer, late, deadline)
        except ChecksumMismatchError:
            if chunk.senders == [peer]:
                self._make_look(peer, address, chunk)
            self.on_mismatch(chunk)
            chunk.restart()
        except CanceledError:
            raise
        except BdnError as error:
            if manifest is not None or not isinstance(error, NotFoundError):  # else it does not hold what it need not
                self.peers.blame(peer, Fault.FAILED)
                if not self.context.budget.retry():
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

    def _leave(self, peer: str, late: LateError, deadline: SourceDeadline) -> None:
        if late.is_fault:
            self.peers.late(peer, has_begun=deadline.has_begun)
        if late.failure and not self.context.budget.retry():
            raise StoreUnavailableError(late.failure) from None

    def _deadline(self, peer: str, size: int) -> SourceDeadline:
        """Of one request for so many bytes."""

        def may_leave(missing: int) -> bool:
            if self.context.budget.hedge(missing):
                return True
            self.peers.late(peer, has_begun=deadline.has_begun)  # new requests go elsewhere, at least
            return False

        limits, is_at_fault = partial(self.peers.limits, size), partial(self.peers.is_at_fault, peer)
        alternative = Alternative(limits, may_leave, is_at_fault, self.context.is_ending)
        deadline = SourceDeadline.of_peer(size, self.stop, alternative, self.peers.clock, self.waits)
        return deadline
