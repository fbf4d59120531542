"""Waits that callers share: for a change, for the result of one piece of work, for the result of one read.

One event loop.

``Watch`` wakes the waiters of a change by this process, on commit (``bdn.mirror.db.database``). A change by another
process is found at the waiter's next read: every waiter reads again within a second, and all waiters of one thing share
the read. ``SingleFlight`` does work by key: a caller that requests it while it is under way waits for the result.
``SharedRead`` repeats one read, and its result may be a little old.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary

from bdn.core.errors import BdnError, StoreUnavailableError, single_error

logger = logging.getLogger(__name__)
_Seen = TypeVar("_Seen")


NEW_WORK: Final = "new work"  # workers wait for this: a mirror was requested or released
JOBS_CHANGED: Final = "training jobs changed"  # the controller waits for this, also of mirrors that ended


def agent_topic(cluster: str, node: str) -> str:
    return f"agent {cluster}/{node}"


def cancel_topic(mirror_id: str) -> str:
    """The worker of a mirror waits for this: the mirror was canceled."""
    return f"{mirror_id} canceled"


def asked_topic(kind: str) -> str:
    """Workers of the mirror's part of operations of this kind wait for this."""
    return f"{kind} asked"


KEEPERS_WORK: Final = asked_topic("verification")  # also notified of damage that was found


class Topic:
    """``changes`` counts the changes for as long as a caller holds the topic."""

    def __init__(self) -> None:
        self.changes = 0
        self._next = asyncio.Event()

    def change(self) -> None:
        self.changes += 1
        self._next.set()
        self._next = asyncio.Event()

    async def changed(self, since: int, timeout_seconds: float) -> bool:
        """Wait until there were more changes than ``since``. Returns False on timeout.

        Get ``changes`` before reading the data: a change during the read is then not missed.
        """
        if self.changes == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._next.wait()
        return self.changes != since


_LOOK_AGAIN_SECONDS: Final = 0.5  # between two reads of a waiter, for changes by other processes


class Watch:
    """Topics by their names, such as a mirror's id. One event loop."""

    def __init__(self) -> None:
        self._topics: WeakValueDictionary[str, Topic] = WeakValueDictionary()
        self.stopping = False

    def topic(self, name: str) -> Topic:
        """The topic that all its holders share. Changes while it has no holder are not counted: read afterwards."""
        return self._topics.setdefault(name, Topic())

    def names(self) -> list[str]:
        return list(self._topics)

    def notify(self, name: str) -> None:
        if (topic := self._topics.get(name)) is not None:
            topic.change()

    def stop(self) -> None:
        """Wake all waiters, now and from now on: the service ends, and answers open requests with what is known."""
        self.stopping = True
        for topic in list(self._topics.values()):
            topic.change()

    async def look_until(
        self,
        name: str,
        look: Callable[[], Awaitable[_Seen]],
        is_over: Callable[[_Seen], bool],
        wait_seconds: float,
        *,
        again_seconds: float | None = None,
    ) -> _Seen:
        """What ``look`` returned last.

        Calls it at once, at changes, and every ``again_seconds``, until ``is_over`` or timeout.
        """
        deadline = time.monotonic() + wait_seconds
        topic = self.topic(name)
        changes = topic.changes
        seen = await look()
        while not is_over(seen) and not self.stopping and (left := deadline - time.monotonic()) > 0:
            await topic.changed(changes, min(left, again_seconds or _LOOK_AGAIN_SECONDS))
            changes = topic.changes
            seen = await look()
        return seen


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the work until the block ends, then cancel it. A failure of the work ends the block."""
    with single_error():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()


async def repeated(work: Callable[[], Awaitable[None]], seconds: float, what: str) -> None:
    """Run until canceled: do the work, wait ``seconds``, repeat. A failure is logged as "cannot ``what`` now"."""
    while True:
        try:
            await work()
        except BdnError as error:
            logger.warning("cannot %s now; retrying", what, extra={"error": str(error)})
        await asyncio.sleep(seconds)


_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


class SingleFlight(Generic[_Key, _Result]):
    """Work by key, once at a time. If the leader fails or is canceled, a waiter takes over."""

    def __init__(self) -> None:
        self._flights: dict[_Key, asyncio.Future[_Result]] = {}

    async def run(self, key: _Key, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """The result of this call's work, or of the work that was already under way."""
        while (flight := self._flights.get(key)) is not None:
            await asyncio.wait([flight])
            if not flight.cancelled():
                return flight.result()
        # Test and entry are one step of the event loop: of two callers the first enters and the second sees the entry.
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        try:
            result = await work()
            flight.set_result(result)
        finally:
            flight.cancel()  # no-op after a result
            del self._flights[key]
        return result


class SharedRead(Generic[_Result]):
    """What ``read`` returned, at most ``seconds`` ago, and since the last change of the topic.

    ``forget`` is a change for this read alone.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[_Result]],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        topic: Topic | None = None,
    ) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._topic = topic or Topic()
        self._result: tuple[float, int, _Result] | None = None  # its start, and the number of changes before
        self._failure: tuple[float, Exception] | None = None
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Every later ``get`` sees the change, even if a read is under way at this moment."""
        self._topic.change()

    async def get(self) -> _Result:
        """One caller reads; the others wait for the result, or for the exception of ``read``.

        With ``seconds`` 0, a read that began before this call is too old: of many callers at once, the first reads, and
        the second reads for all others. A result is never too old for a caller that requested it before the read began,
        however long the read takes.
        """
        asked = self._clock()
        async with self._lock:
            if self._result is not None:
                began, changes, result = self._result
                if began >= min(asked, self._clock() - self._seconds) and changes == self._topic.changes:
                    return result
            if self._failure is not None and self._failure[0] >= asked:
                raise self._failure[1].with_traceback(None)
            began, changes = self._clock(), self._topic.changes
            self._failure = None
            try:
                result = await self._read()
            except Exception as error:
                self._failure = (began, error)
                raise
            self._result = (began, changes, result)
            if 0 < self._seconds < math.inf:
                # The timer holds this read, so that the next caller finds the result.
                asyncio.get_running_loop().call_later(self._seconds, self._lapse, began)
            return result

    def _lapse(self, began: float) -> None:
        if self._result is not None and self._result[0] == began:
            self._result = None


class ThreadRead(Generic[_Result]):
    """A blocking read, in one thread at a time.

    Callers share a read that is under way, even after the caller that began it was canceled.
    """

    def __init__(self, read: Callable[[], _Result]) -> None:
        self._read = read
        self._under_way: asyncio.Future[_Result] | None = None

    async def get(self) -> _Result:
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(asyncio.to_thread(self._read))
        return await asyncio.shield(self._under_way)


class SharedReads(Generic[_Key, _Result]):
    """One shared read for each key, for as long as a caller holds it or its result is valid."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held: WeakValueDictionary[_Key, SharedRead[_Result]] = WeakValueDictionary()

    def of(self, key: _Key, read: Callable[[], Awaitable[_Result]], topic: Topic | None = None) -> SharedRead[_Result]:
        """The read that all callers with this key share. Equal keys have equal ``read`` and ``topic``."""
        return self._held.setdefault(key, SharedRead(read, self._seconds, topic=topic))

    def __len__(self) -> int:
        return len(self._held)


_ANSWER_SECONDS: Final = 30.0


def answer_of(loop: asyncio.AbstractEventLoop, answer: Coroutine[Any, Any, _Result]) -> _Result:
    """For a thread: the result of ``answer`` on ``loop``. Raises ``StoreUnavailableError`` after 30 s.

    The loop finishes the work even then.
    """
    try:
        return asyncio.run_coroutine_threadsafe(answer, loop).result(_ANSWER_SECONDS)
    except TimeoutError:
        raise StoreUnavailableError(f"no answer within {_ANSWER_SECONDS:g} s") from None
