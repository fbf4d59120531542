"""What several want at once is done once: for byte threads and for the event loop."""

import asyncio
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Final

from bdn.core.errors import BdnError, CanceledError

_LOOK_SECONDS: Final = 0.1  # how long a waiting thread may overlook that it shall stop


class ReadsInProgress:
    """What is being obtained now, by key. Safe for threads and event loops alike.

    A and B need the same chunk, look for it and miss. A leads and reads; B is refused the lead and waits. A puts the chunk
    where others find it and *then* leaves the block; B looks again and finds it. C, who had missed before A was through, asks
    for the lead only now and gets it although the chunk is here: so whoever leads looks once more before it reads. If A
    fails, B is woken as well, misses again, and may lead in A's place.

    Lead only where the work begins at once. A leader that had to wait for a thread could wait for ever: all threads may be
    those of others that wait for it.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, Future[None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lead(self, key: Hashable) -> Iterator[bool]:
        """Whether it is the caller's to do, until the block ends. Others hear of the block's ``BdnError``, if it raises one."""
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
            # What is no error of ours, such as a cancellation, is the leader's own affair.
            self._end(key).set_exception(
                error if isinstance(error, BdnError) else CanceledError("the read that others wait for")
            )
            raise
        self._end(key).set_result(None)

    def flight(self, key: Hashable) -> Future[None] | None:
        """Done once the leader is through, with its error if it failed; None when nobody leads. Not to be canceled."""
        with self._lock:
            return self._flights.get(key)

    def wait(self, key: Hashable, timeout_seconds: float, stop: threading.Event) -> bool:
        """Block until the leader is through; False when the time is over or ``stop`` is set before."""
        flight, deadline = self.flight(key), time.monotonic() + timeout_seconds
        while flight is not None and not flight.done():
            left = deadline - time.monotonic()
            if left <= 0 or stop.is_set():
                return False
            wait_for([flight], min(left, _LOOK_SECONDS))
        return True  # somebody else may lead already; whether the chunk is here is for the caller to see

    def _end(self, key: Hashable) -> Future[None]:
        with self._lock:
            return self._flights.pop(key)


async def landed(flight: Future[None]) -> None:
    """Wait on the loop for somebody else's work. Whoever returns from here looks again, and may have to lead.

    Raises:
        BdnError: the work failed for a reason that would be ours as well, because it may pass for all: asking the mirror
            once more for each of many that wait would not make it well. Work that ended for its leader's own reasons,
            such as a grant that expired or a stage that was released, is no reason to fail.
    """
    # The future is everybody's: ``wait`` does not cancel it with one who waits. Its error is looked at below, or, by one who
    # was canceled, nowhere: asyncio is not to complain of that.
    waiter = asyncio.wrap_future(flight)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiter])
    error = flight.exception()
    if isinstance(error, BdnError) and error.transient:
        raise error
