"""Failures that may pass are tried again, under one policy."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.ports import ChunkReader
from bdn.transfer.http_chunks import WrongLengthError


@dataclass(frozen=True)
class Retrier:
    """Runs blocking calls again after transient errors, with full jitter, until ``stop`` is set.

    A byte thread sleeps on ``stop``, so that cancelling a fill does not wait for a backoff to end.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    stop: threading.Event = field(default_factory=threading.Event)
    draw: Callable[[], float] = random.random

    def run(self, call: Callable[[], None]) -> None:
        """``call`` until it succeeds, or its last error."""
        failures = 0
        while True:
            if self.stop.is_set():
                raise CanceledError("the transfer")
            try:
                call()
            except BdnError as error:
                failures += 1
                delay = self.policy.delay(failures, error, self.draw())
                if delay is None:
                    raise
                self.stop.wait(delay)
            else:
                return


@dataclass(frozen=True)
class RetryingReader:
    """Wraps a reader. One wrong chunk is fetched once more, because a wire can flip a bit; twice wrong is not chance.

    ``again`` is the reader for that, where another one is better: it may tell the other side what came.
    """

    inner: ChunkReader
    retrier: Retrier
    again: ChunkReader | None = None

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill ``buffer`` with the chunk, or raise the last error."""

        def call() -> None:
            try:
                self.inner.read_into(digest, buffer)
            except (ChecksumMismatchError, WrongLengthError):
                (self.again or self.inner).read_into(digest, buffer)

        self.retrier.run(call)
