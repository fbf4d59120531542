"""What many callers wait for together: a change, the result of one piece of work, the result of one read. One event loop.

``Watch`` wakes whoever waits for a change, so that nobody asks the database all the time. Changes made in this process wake
waiters at once; changes made by another process are seen when the caller looks again, because every wait has a bound.
``SingleFlight`` does work by key: a caller who asks while it is under way waits for the result. ``SharedRead`` repeats one
read, and its result may be a little old.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary

from bdn.core.errors import single_error

_Seen = TypeVar("_Seen")


NEW_WORK: Final = "new work"  # what workers wait for: a mirror that was asked for
DAMAGE: Final = "damage"  # what the store's keeper waits for


def agent_topic(cluster: str, node: str) -> str:
    """What an agent's open heartbeat waits for."""
    return f"agent {cluster}/{node}"


class Watch:
    """Topics are names such as a mirror's id. One event loop."""

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.stopping = False

    def stop(self) -> None:
        """Wake everybody, now and from now on: the service ends, and open requests shall be answered with what is known."""
        self.stopping = True
        for topic in tuple(self._waiters):
            self.notify(topic)

    def notify(self, topic: str) -> None:
        """Wake everybody who waits for this topic now."""
        for event in self._waiters.pop(topic, ()):
            event.set()

    async def changed(self, topic: str, timeout_seconds: float) -> bool:
        """Wait for a notification; False when the time ran out. What changed before the call is not noticed: look first."""
        event = asyncio.Event()
        self._waiters[topic].add(event)
        try:
            async with asyncio.timeout(timeout_seconds):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            waiting = self._waiters.get(topic)
            if waiting is not None:
                waiting.discard(event)
                if not waiting:
                    del self._waiters[topic]
        return True

    async def look_until(
        self,
        topic: str,
        look: Callable[[], Awaitable[_Seen]],
        is_over: Callable[[_Seen], bool],
        wait_seconds: float,
        again_seconds: float,
    ) -> _Seen:
        """What ``look`` saw last. It looks at once, at changes, and every ``again_seconds``, while there is time."""
        deadline = time.monotonic() + wait_seconds
        seen = await look()
        while not is_over(seen) and not self.stopping and (left := deadline - time.monotonic()) > 0:
            await self.changed(topic, min(left, again_seconds))
            seen = await look()
        return seen


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """The work goes on until the block ends, and is canceled then. Its failure ends the block."""
    with single_error():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()


_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


class SingleFlight(Generic[_Key, _Result]):
    """Work by key. A result stays until ``forget``. When the leader fails or is canceled, a waiter takes over."""

    def __init__(self) -> None:
        self._flights: dict[_Key, asyncio.Future[_Result]] = {}

    async def run(self, key: _Key, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """The result of this call's work, or of somebody else's that was under way."""
        while not self.lead(key):
            flight = self._flights[key]
            await asyncio.wait([flight])
            if not flight.cancelled():
                return flight.result()
        try:
            result = await work()
        except BaseException:
            self.give_up(key)
            raise
        self.land(key, result)
        return result

    def lead(self, key: _Key) -> bool:
        """Whether nobody works on this, nor has; then it is the caller's to ``land`` or to ``give_up``."""
        # There is no await between the test and the entry, so of two callers one enters first and the other sees it.
        if key in self._flights:
            return False
        self._flights[key] = asyncio.get_running_loop().create_future()
        return True

    def land(self, key: _Key, result: _Result) -> None:
        """The work that the caller leads is done."""
        self._flights[key].set_result(result)

    def give_up(self, key: _Key) -> None:
        """The work that the caller leads will not be done: a waiter takes over."""
        self._flights.pop(key).cancel()

    def forget(self, keys: Collection[_Key]) -> None:
        """Drop results, which can be found elsewhere now, or nowhere any more. Work that is under way stays.

        A leads, B waits, both have the result, A forgets it; C finds nothing and leads again; B forgets what A did, and must
        not drop C's entry.
        """
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None and flight.done():
                del self._flights[key]


class SharedRead(Generic[_Result]):
    """What ``read`` returned, at most ``seconds`` ago; a change in this process calls ``forget``."""

    def __init__(
        self, read: Callable[[], Awaitable[_Result]], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._result: tuple[float, _Result] | None = None
        self._failure: tuple[float, Exception] | None = None
        self._changes = 0
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Something changed: every later ``get`` sees it, also when a read is under way at this moment."""
        self._changes += 1
        self._result = None

    async def get(self, *, anew: bool = False) -> _Result:
        """One caller reads; the others wait for the result, or for the exception of ``read``.

        ``anew`` is for a caller that has heard of a change: a read that began before this call is too old for it. Of many
        that heard at once, the first reads, and the second reads for all others. A result is never too old for a caller that
        asked before the read began, however long the read takes.
        """
        asked = self._clock()
        async with self._lock:
            oldest = asked if anew else min(asked, self._clock() - self._seconds)
            if self._result is not None and self._result[0] >= oldest:
                return self._result[1]
            if self._failure is not None and self._failure[0] >= asked:
                raise self._failure[1].with_traceback(None)
            began, changes = self._clock(), self._changes
            self._failure = None
            try:
                result = await self._read()
            except Exception as error:
                self._failure = (began, error)
                raise
            if changes == self._changes:
                self._result = (began, result)
            return result


class SharedReads(Generic[_Key, _Result]):
    """One shared read for each key, for as long as somebody holds it. ``seconds`` as of ``SharedRead``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held: WeakValueDictionary[_Key, SharedRead[_Result]] = WeakValueDictionary()

    def of(self, key: _Key, read: Callable[[], Awaitable[_Result]]) -> SharedRead[_Result]:
        """The read that all callers with this key share. Equal keys have equal ``read``."""
        return self._held.setdefault(key, SharedRead(read, self._seconds))

    def __len__(self) -> int:
        """How many keys are in use."""
        return len(self._held)
