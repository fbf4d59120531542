"""Readers of chunks: one method, and readers that wrap other readers."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, StoreUnavailableError
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.transfer.under_way import Arriving
from bdn.wire.operation_schema import Tier
from bdn.wire.stage_schema import ChunkStep

BytesByTier = Mapping[Tier, int]  # bytes of one chunk by the tier that they came from


class PartialChunk:
    """One chunk on its way into ``buffer``, which is exactly as long, from one source after the other.

    The next source goes on where the last one broke off. Each piece is hashed as it comes: to hash 8 MiB when all of them
    are there costs half as much again for the whole of a transfer, because by then the first ones have left the processor's
    cache.
    """

    def __init__(
        self,
        digest: Digest,
        buffer: memoryview,
        store: Callable[[], None] | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        """``store`` puts the whole chunk where this node serves it from. ``arriving`` counts what other sources send of it."""
        self.digest = digest
        self.buffer = buffer
        self._store = store
        self._arriving = arriving or Arriving()
        self.restart()

    def restart(self) -> None:
        """Nothing of what came so far is to be used."""
        self.done = self._arriving.received = 0
        self._sources: list[tuple[Tier, str, int]] = []  # tier, name, and how much was there before it
        self._hasher = blake3()

    @property
    def missing(self) -> int:
        """Bytes that have not come."""
        return len(self.buffer) - self.done

    def begin_source(self, tier: Tier, name: str) -> None:
        """What is ``received`` from now on comes from this one."""
        self._sources.append((tier, name, self.done))
        self.at("cluster" if tier == "cluster" else "mirror")

    def at(self, step: ChunkStep) -> None:
        """What the chunk waits for from now on, for whoever watches the transfer."""
        self._arriving.step = step

    def received(self, piece: memoryview) -> None:
        """The next bytes are in the buffer."""
        self._hasher.update(piece)
        self.done += len(piece)
        self._arriving.received = self.done

    def found(self, tier: Tier) -> None:
        """The whole chunk is in the buffer, verified, from a tier of this node."""
        self._sources = [(tier, "", 0)]
        self.done = len(self.buffer)

    def check(self) -> None:
        """Raises ``ChecksumMismatchError`` when what was received is not the chunk."""
        actual = Digest(self._hasher.hexdigest())
        if actual != self.digest:
            raise ChecksumMismatchError(f"chunk {self.digest}", str(self.digest), str(actual))

    def store(self) -> None:
        """Put the whole chunk where this node serves it from, once."""
        if self._store is not None:
            store, self._store = self._store, None
            self.at("disk")
            store()

    @property
    def senders(self) -> list[str]:
        """The names of the sources that sent some of it, in order."""
        return list(dict.fromkeys(name for _, name, count in self._counts() if count))

    @property
    def bytes_by_tier(self) -> BytesByTier:
        """Where the bytes came from."""
        tiers = Counter[Tier]()
        for tier, _, count in self._counts():
            tiers[tier] += count
        return +tiers

    def _counts(self) -> list[tuple[Tier, str, int]]:
        stops = [start for _, _, start in self._sources[1:]] + [self.done]
        return [(tier, name, stop - start) for (tier, name, start), stop in zip(self._sources, stops, strict=False)]


class ChunkReader(Protocol):
    """Anything chunks can be read from: a tier of this node, peers, a mirror."""

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring what is missing of the chunk. Blocking; called from byte threads.

        Raises:
            BdnError: NotFoundError when this reader does not hold it, a transient error when it may later.
                ``chunk.done`` then counts the bytes that came, and another reader may go on from there.
        """


def fetch(
    reader: ChunkReader,
    digest: Digest,
    buffer: memoryview,
    store: Callable[[], None],
    arriving: Arriving | None = None,
) -> BytesByTier:
    """Read a chunk into ``buffer`` and ``store`` it where this node serves it from. Says where its bytes came from."""
    chunk = PartialChunk(digest, buffer, store, arriving)
    reader.read_into(chunk)
    chunk.store()
    return chunk.bytes_by_tier


class WrongLengthError(StoreUnavailableError):
    """What would come cannot be the chunk: whoever sends it holds something else under its name."""


@dataclass(frozen=True)
class VerifyingReader:
    """Believes nothing before its name has been computed again.

    A chunk that is wrong is dropped and read once more with ``again``, because a wire can flip a bit; twice wrong is not
    chance. ``again`` may tell the other side what came. ``on_mismatch`` is told before what came is dropped.
    """

    inner: ChunkReader
    again: ChunkReader
    on_mismatch: Callable[[PartialChunk], None]

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the right chunk. Raises ``ChecksumMismatchError`` besides what the inner reader raises."""
        try:
            self._verified(self.inner, chunk)
        except (ChecksumMismatchError, WrongLengthError):
            self._verified(self.again, chunk)

    def _verified(self, reader: ChunkReader, chunk: PartialChunk) -> None:
        try:
            reader.read_into(chunk)
            chunk.check()
        except (ChecksumMismatchError, WrongLengthError):
            self.on_mismatch(chunk)
            chunk.restart()
            raise


@dataclass(frozen=True)
class RetryingReader:
    """Reads again after failures that may pass, with full jitter, until ``stop`` is set; goes on from what came.

    A byte thread sleeps on ``stop``, so that cancelling a fill does not wait for a backoff to end. ``may_retry`` is asked
    before each further attempt, and ``on_arrival`` told of success, with the time at which the attempt was begun.
    """

    inner: ChunkReader
    policy: RetryPolicy
    stop: threading.Event
    may_retry: Callable[[float], bool] = lambda _: True
    on_arrival: Callable[[float], None] = lambda _: None
    draw: Callable[[], float] = random.random

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring the chunk, or raise the last error."""
        outage = Outage(self.policy)
        while True:
            if self.stop.is_set():
                raise CanceledError("the transfer")
            sent = time.monotonic()
            try:
                self.inner.read_into(chunk)
            except BdnError as error:
                delay = outage.delay(error, time.monotonic() - sent, self.draw())
                if delay is None or not self.may_retry(sent):
                    raise
            else:
                return self.on_arrival(sent)
            self.stop.wait(delay)
