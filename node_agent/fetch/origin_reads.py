"""Who on this node reads which chunk from the mirror right now: one at a time, and everybody else waits for that one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CanceledError

_LOOK_SECONDS: Final = 0.1  # how long a waiting byte thread may overlook that it shall stop


class OriginReads:
    """The reads from the mirror that are going on. Safe for any thread, fills and peers' requests alike.

    How to use it, as a story. A and B need the same chunk, look for it on this disk and miss. A leads and reads; B is
    refused the lead and waits. A makes the chunk servable and *then* says that it landed; B looks on the disk again and
    finds it. C, who had missed before A landed, asks for the lead only now, and gets it although the chunk is here: so
    whoever leads looks on the disk once more before it asks the mirror. If A fails, B is woken as well, misses again, and
    may lead in A's place.

    Lead only from a thread that reads at once. A leader that still had to wait for a thread could wait for ever: all
    threads may be those of fills that wait for its chunk.
    """

    def __init__(self) -> None:
        self._reads: dict[Digest, Future[None]] = {}
        self._lock = threading.Lock()

    def lead(self, digest: Digest) -> bool:
        """Whether it is the caller's to read. Then it must end in ``landed`` or ``failed``, whatever happens."""
        with self._lock:
            if digest in self._reads:
                return False
            self._reads[digest] = Future()
            return True

    def landed(self, digest: Digest) -> None:
        """The leader's chunk is where everybody on this node finds it."""
        self._end(digest).set_result(None)

    def failed(self, digest: Digest, error: BaseException) -> None:
        """The leader gives up; whoever waits may lead. What is no error of ours, such as a cancellation, is its own affair."""
        self._end(digest).set_exception(
            error if isinstance(error, BdnError) else CanceledError(f"the read of {digest}")
        )

    def landing(self, digest: Digest) -> Future[None] | None:
        """Done once the read is over, with its leader's error if it failed; None when nobody reads. Not to be canceled."""
        with self._lock:
            return self._reads.get(digest)

    def wait(self, digest: Digest, timeout_seconds: float, stop: threading.Event) -> bool:
        """Block until nobody reads this chunk; False when the time is over or ``stop`` is set before."""
        deadline = time.monotonic() + timeout_seconds
        while (future := self.landing(digest)) is not None:
            left = deadline - time.monotonic()
            if left <= 0 or stop.is_set():
                return False
            wait_for([future], min(left, _LOOK_SECONDS))
            if future.done():
                return True  # somebody else may lead already; whether the chunk is here is for the caller to see
        return True

    def _end(self, digest: Digest) -> Future[None]:
        with self._lock:
            return self._reads.pop(digest)
