"""The chunks of one fill: from this node, from their owner, from who has them from it, from the next owner, from the mirror.

While the mirror is out of reach, from whoever has them.

Read ``_once`` first.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, NotFoundError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.ring.peer_standing import Fault
from bdn.core.ring.routes import HOLDERS_ASKED
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader, WrongLengthError
from bdn.wire.eviction_schema import Tier
from node_agent.fetch.deadlines import Alternative, LateError, SourcePatience, Waits
from node_agent.fetch.origin_reads import OriginReads
from node_agent.fetch.partial_chunk import Gathering
from node_agent.fetch.peers import Peers
from node_agent.fetch.retry_budget import Effort
from node_agent.fetch.routing import Routing
from node_agent.fetch.supply import Came

_MIRROR: Final = ""  # among the names of sources; no node is called so
_WAIT_SECONDS: Final = 60.0  # for another reader on this node, before looking again


class Local(Protocol):
    """What this node holds."""

    def read_into(self, digest: Digest, buffer: memoryview) -> Tier | None:
        """Fill ``buffer`` with the chunk, verified, and say which tier holds it; None when it is not here."""
        ...


@dataclass(frozen=True)
class Bearings:
    """What the supplies of one stage share: whose its chunks are, whose right it has, and what it may still spend.

    ``is_ending`` tells whether no chunk is left to be asked of peers but those that are being asked for.
    """

    manifest: Digest
    bearer: str
    routing: Routing
    effort: Effort
    is_ending: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class RingSupply:
    """A ``Supply`` that asks the ring before the mirror. One chunk is read from the mirror by one thread of this node.

    ``connections`` are those to peers. ``on_mismatch`` counts chunks that arrived with the wrong content.
    """

    mirror: HttpChunkReader
    local: Local
    reads: OriginReads
    peers: Peers
    connections: ConnectionPool
    bearings: Bearings
    stop: threading.Event
    policy: RetryPolicy
    on_mismatch: Callable[[], None]
    waits: Waits
    draw: Callable[[], float] = random.random

    def fetch(self, digest: Digest, buffer: memoryview, keep: Callable[[], None]) -> Came:
        """The chunk, from wherever it can be had; again after failures that may pass, as far as the stage's effort goes."""
        failures = 0
        while True:
            if self.stop.is_set():
                raise CanceledError("the transfer")
            try:
                return self._once(Gathering(digest, buffer), keep)
            except BdnError as error:
                failures += 1
                delay = self.policy.delay(failures, error, self.draw())
                if delay is None or not self.bearings.effort.retry():
                    raise
                self.stop.wait(delay)

    def _once(self, chunk: Gathering, keep: Callable[[], None]) -> Came:
        if tier := self.local.read_into(chunk.digest, chunk.buffer):
            keep()
            return {tier: len(chunk.buffer)}
        for peer, manifest in self._sources(chunk.digest):
            if self._ask(peer, chunk, manifest):
                keep()
                return chunk.came
        if self.peers.is_mirror_avoided() and self._ask_everybody(chunk):
            keep()
            return chunk.came
        try:
            return self._lead_or_wait(chunk, keep)
        except BdnError as error:
            if not error.transient or self.stop.is_set() or not self._ask_everybody(chunk):
                raise
        keep()
        return chunk.came

    # --- peers ---

    def _sources(self, digest: Digest) -> Iterator[tuple[str, Digest | None]]:
        """Peers, each with the manifest for which it is to obtain the chunk.

        Where the owner does not serve, the next owner would read the chunk from the mirror once more. So others are asked
        before it, only for what they hold: of those who asked the owner first, some by lot, that not all ask the same.
        """
        routing, manifest = self.bearings.routing, self.bearings.manifest
        owners = routing.peers(digest, self.peers.is_avoided)
        if owners and owners[0] == routing.owner(digest):
            yield owners[0], manifest
            owners = owners[1:]
        holders = [peer for peer in routing.ahead(digest) if not (peer in owners or self.peers.is_avoided(peer))]
        for _ in range(min(HOLDERS_ASKED, len(holders))):
            yield holders.pop(int(self.draw() * len(holders))), None
        for owner in owners:
            yield owner, manifest

    def _ask_everybody(self, chunk: Gathering) -> bool:
        """From whoever holds it: a member that joined later than the others came to the chunk owns what only they have."""
        for peer in self.bearings.routing.everybody(chunk.digest):
            if not self.peers.is_avoided(peer) and self._ask(peer, chunk, None):
                return True
        return False

    def _ask(self, peer: str, chunk: Gathering, manifest: Digest | None) -> bool:
        """What is missing of the chunk from this peer. False when the next source is to go on, with what is there by then."""
        address = self.peers.address(peer)
        if address is None or not self.peers.claim(peer):
            return False
        missing, effort = chunk.missing, self.bearings.effort
        patience = self._patience(peer, missing)
        reader = HttpChunkReader(self.connections, address, self.bearings.bearer, manifest, lambda _: patience)
        try:
            reader.read_rest(chunk.digest, chunk.buffer, chunk.done, chunk.taking("cluster", peer))
            chunk.check()
        except LateError as late:
            self._leave(peer, late, patience)
        except ChecksumMismatchError:
            if chunk.sources == [peer]:
                self._make_look(peer, address, chunk)
            self._suspect(chunk)
        except CanceledError:
            raise
        except BdnError as error:
            if manifest is not None or not isinstance(error, NotFoundError):  # else it does not hold what it need not
                self.peers.blame(peer, Fault.FAILED)
                if not effort.retry():
                    raise
        else:
            self.peers.served(peer, missing, patience.taken)
            return True
        return False

    def _make_look(self, peer: str, address: str, chunk: Gathering) -> None:
        """Let it compare what it holds with its name, before it sends it to others. What it answers does not matter."""
        patience = self._patience(peer, 1)
        reader = HttpChunkReader(
            self.connections, address, self.bearings.bearer, patience=lambda _: patience, is_suspect=True
        )
        with suppress(BdnError, LateError):
            reader.read_rest(chunk.digest, chunk.buffer, len(chunk.buffer) - 1)  # no more than a byte of it

    def _leave(self, peer: str, late: LateError, patience: SourcePatience) -> None:
        if late.is_fault:
            self.peers.late(peer, has_begun=patience.has_begun)
        if late.failure and not self.bearings.effort.retry():
            raise StoreUnavailableError(late.failure) from None

    def _patience(self, peer: str, size: int) -> SourcePatience:
        """With one request for so many bytes."""

        def may_leave(missing: int) -> bool:
            if self.bearings.effort.hedge(missing):
                return True
            self.peers.late(peer, has_begun=patience.has_begun)  # new requests go elsewhere, at least
            return False

        limits, is_at_fault = partial(self.peers.limits, size), partial(self.peers.is_at_fault, peer)
        alternative = Alternative(limits, may_leave, is_at_fault, self.bearings.is_ending)
        patience = SourcePatience.with_peer(size, self.stop, alternative, self.peers.clock, self.waits)
        return patience

    def _suspect(self, chunk: Gathering) -> None:
        """The whole is wrong. Who sent all of it lied; of several, nobody knows which one did. Nothing of it is used."""
        self.on_mismatch()
        fault = Fault.WRONG if len(chunk.sources) == 1 else Fault.FAILED
        for source in chunk.sources:
            if source != _MIRROR:
                self.peers.blame(source, fault)
        chunk.begin()

    # --- the mirror ---

    def _lead_or_wait(self, chunk: Gathering, keep: Callable[[], None]) -> Came:
        """From the mirror, unless somebody on this node reads it right now: then from this node, once that one has it."""
        while not self.reads.lead(chunk.digest):
            self.reads.wait(chunk.digest, _WAIT_SECONDS, self.stop)
            if self.stop.is_set():
                raise CanceledError("the transfer")
            if tier := self.local.read_into(chunk.digest, chunk.buffer):
                keep()
                return {tier: len(chunk.buffer)}
        try:
            came = self._from_mirror(chunk)
            keep()
        except BaseException as error:
            self.reads.failed(chunk.digest, error)
            raise
        self.reads.landed(chunk.digest)  # only now: who waited for it looks for it at once
        return came

    def _from_mirror(self, chunk: Gathering) -> Came:
        """We lead. It may have landed between our last look and the lead, so that we look once more."""
        if tier := self.local.read_into(chunk.digest, chunk.buffer):
            return {tier: len(chunk.buffer)}
        try:
            self._read_mirror(self.mirror, chunk)
        except (ChecksumMismatchError, WrongLengthError):
            self._suspect(chunk)  # a peer's part may have been wrong, or a wire flipped a bit
            try:
                self._read_mirror(replace(self.mirror, is_suspect=True), chunk)
            except ChecksumMismatchError:
                self._suspect(chunk)
                raise
        return chunk.came

    def _read_mirror(self, reader: HttpChunkReader, chunk: Gathering) -> None:
        if (missing := chunk.missing) or not chunk.buffer:
            patience = SourcePatience.with_mirror(missing, self.stop, self.waits)
            mirror = replace(reader, patience=lambda _: patience)
            try:
                mirror.read_rest(chunk.digest, chunk.buffer, chunk.done, chunk.taking("mirror", _MIRROR))
            except BdnError as error:
                if error.transient:
                    self.peers.blame_mirror()
                raise
            self.peers.read(missing, patience.taken)
        chunk.check()
