"""Readers of chunks: one Protocol, and readers that wrap other readers."""

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
    """One chunk being read into ``buffer``, which has exactly its size, from one source after the other.

    The next source resumes where the last one broke off. Each piece is hashed as it arrives: hashing 8 MiB at the end
    would add half as much again to the time of the whole transfer, because by then the first pieces have left the
    processor's cache.
    """

    def __init__(
        self,
        digest: Digest,
        buffer: memoryview,
        store: Callable[[], None] | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        """``store`` puts the whole chunk where this node serves it from; ``arriving`` counts bytes from other nodes."""
        self.digest = digest
        self.buffer = buffer
        self._store = store
        self._arriving = arriving or Arriving()
        self.restart()

    def restart(self) -> None:
        self.done = self._arriving.received = 0
        self._sources: list[tuple[Tier, str, int]] = []  # tier, name, and bytes received before it
        self._hasher = blake3()

    @property
    def missing(self) -> int:
        return len(self.buffer) - self.done

    def begin_source(self, tier: Tier, name: str) -> None:
        """Attribute bytes ``received`` from now on to this source."""
        self._sources.append((tier, name, self.done))
        self.at("cluster" if tier == "cluster" else "mirror")

    def at(self, step: ChunkStep) -> None:
        """Show what the chunk waits for from now on, for progress reports."""
        self._arriving.step = step

    def received(self, piece: memoryview) -> None:
        """Count the next bytes, which are already in the buffer."""
        self._hasher.update(piece)
        self.done += len(piece)
        self._arriving.received = self.done

    def found(self, tier: Tier) -> None:
        """The buffer contains the whole chunk, verified, from a tier of this node."""
        self._sources = [(tier, "", 0)]
        self.done = len(self.buffer)

    def check(self) -> None:
        """Raises ``ChecksumMismatchError`` if the received bytes are not the chunk."""
        actual = Digest(self._hasher.hexdigest())
        if actual != self.digest:
            raise ChecksumMismatchError(f"chunk {self.digest}", str(self.digest), str(actual))

    def store(self) -> None:
        """Store the whole chunk where this node serves it from, once."""
        if self._store is not None:
            store, self._store = self._store, None
            self.at("disk")
            store()

    @property
    def senders(self) -> list[str]:
        """Names of the sources that sent at least one byte, in order."""
        return list(dict.fromkeys(name for _, name, count in self._counts() if count))

    @property
    def bytes_by_tier(self) -> BytesByTier:
        tiers = Counter[Tier]()
        for tier, _, count in self._counts():
            tiers[tier] += count
        return +tiers

    def _counts(self) -> list[tuple[Tier, str, int]]:
        stops = [start for _, _, start in self._sources[1:]] + [self.done]
        return [(tier, name, stop - start) for (tier, name, start), stop in zip(self._sources, stops, strict=False)]


class ChunkReader(Protocol):
    """A source of chunks: a tier of this node, peers, a mirror."""

    def read_into(self, chunk: PartialChunk) -> None:
        """Read the missing bytes of the chunk. Blocking; called from byte threads.

        Raises:
            BdnError: NotFoundError if this reader does not hold the chunk, a transient error if it may later.
                ``chunk.done`` then counts the bytes received, and another reader may resume there.
        """


def fetch(
    reader: ChunkReader,
    digest: Digest,
    buffer: memoryview,
    store: Callable[[], None],
    arriving: Arriving | None = None,
) -> BytesByTier:
    """Read a chunk into ``buffer``, and ``store`` it. Returns the tiers that its bytes came from."""
    chunk = PartialChunk(digest, buffer, store, arriving)
    reader.read_into(chunk)
    chunk.store()
    return chunk.bytes_by_tier


class WrongLengthError(StoreUnavailableError):
    """The answer's length differs from the chunk's: the sender holds something else under its name."""


@dataclass(frozen=True)
class VerifyingReader:
    """Verifies the chunk's digest.

    A wrong chunk is dropped and read once more with ``again``, because the network may flip a bit; a second time is not
    chance. ``again`` may inform the sender. ``on_mismatch`` is called before the bytes are dropped.
    """

    inner: ChunkReader
    again: ChunkReader
    on_mismatch: Callable[[PartialChunk], None]

    def read_into(self, chunk: PartialChunk) -> None:
        """Raises ``ChecksumMismatchError`` besides what the inner reader raises."""
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
    """Retries after transient failures, with full jitter, until ``stop`` is set; resumes from the received bytes.

    A byte thread sleeps on ``stop``, so that canceling a fill does not wait for a backoff. ``may_retry`` is called
    before each retry, ``on_arrival`` on success, both with the time at which the attempt began.
    """

    inner: ChunkReader
    policy: RetryPolicy
    stop: threading.Event
    may_retry: Callable[[float], bool] = lambda _: True
    on_arrival: Callable[[float], None] = lambda _: None
    draw: Callable[[], float] = random.random

    def read_into(self, chunk: PartialChunk) -> None:
        """Read the chunk, or raise the last error."""
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
