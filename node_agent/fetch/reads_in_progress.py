"""Single flight, for byte threads and the event loop: concurrent callers share one piece of work per key."""

import asyncio
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Final

from bdn.core.errors import BdnError, CanceledError

_LOOK_SECONDS: Final = 0.1  # the longest delay until a waiting thread notices ``stop``


class ReadsInProgress:
    """Work in progress, by key. Safe for threads and event loops.

    A and B need the same chunk, check for it and miss. A leads and reads; B is refused the lead and waits. A stores the
    chunk and *then* leaves the block; B checks again and finds it. C, which missed before A was done, requests the lead
    only now and gets it although the chunk is here: so each leader checks once more before it reads. If A fails, B
    wakes up as well, misses again, and may lead in A's place.

    Lead only when the work begins at once. A leader that waits for a thread may deadlock: all threads may be waiting
    for the leader.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, Future[None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lead(self, key: Hashable) -> Iterator[bool]:
        """Yields whether the caller leads. If the leader's block raises a ``BdnError``, waiting callers get it."""
        with self._lock:
            is_leader = key not in self._flights
            if is_leader:
                self._flights[key] = Future()
        if not is_leader:
            yield False
            return
        try:
            yield True
        except BaseException as error:
            # An exception of another type, such as a cancellation, concerns only the leader.
            self._end(key).set_exception(error if isinstance(error, BdnError) else CanceledError("the shared read"))
            raise
        self._end(key).set_result(None)

    def flight(self, key: Hashable) -> Future[None] | None:
        """Done when the leader is, with its error if it failed. None if there is no leader. Do not cancel it."""
        with self._lock:
            return self._flights.get(key)

    def wait(self, key: Hashable, timeout_seconds: float, stop: threading.Event) -> bool:
        """Block until the leader is done. Returns False on timeout, or if ``stop`` is set."""
        flight, deadline = self.flight(key), time.monotonic() + timeout_seconds
        while flight is not None and not flight.done():
            left = deadline - time.monotonic()
            if left <= 0 or stop.is_set():
                return False
            wait_for([flight], min(left, _LOOK_SECONDS))
        return True  # another caller may lead by now; the caller checks whether the chunk is here

    def _end(self, key: Hashable) -> Future[None]:
        with self._lock:
            return self._flights.pop(key)


async def landed(flight: Future[None]) -> None:
    """Wait on the loop for another caller's work. Afterwards the caller checks again, and may have to lead.

    Raises:
        BdnError: the work failed transiently, which concerns the waiting callers as well: if each of them repeated
            the request, that would not help. Errors of the leader alone, such as an expired grant or a released stage,
            are not raised.
    """
    # The future is shared: ``wait`` does not cancel it with one waiting caller. Its error is read below, or not at all
    # by a canceled caller; the callback retrieves it, so that asyncio does not log it.
    waiter = asyncio.wrap_future(flight)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiter])
    error = flight.exception()
    if isinstance(error, BdnError) and error.transient:
        raise error
