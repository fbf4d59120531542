"""What many callers wait for together: a change, the result of one piece of work, the result of one read. One event loop.

``Watch`` wakes whoever waits for a change, so that nobody asks the database all the time. What this process changes wakes waiters
once it is committed (``bdn.mirror.db.database.tell``). What another process changes is told by PostgreSQL
(``bdn.mirror.db.listening``), or seen when the caller looks again, because every wait has a bound.
``SingleFlight`` does work by key: a caller who asks while it is under way waits for the result. ``SharedRead`` repeats one
read, and its result may be a little old.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary

from bdn.core.errors import StoreUnavailableError, single_error

_Seen = TypeVar("_Seen")


NEW_WORK: Final = "new work"  # what workers wait for: a mirror that was asked for, or given back


def agent_topic(cluster: str, node: str) -> str:
    """What an agent's open heartbeat waits for."""
    return f"agent {cluster}/{node}"


def cancel_topic(mirror_id: str) -> str:
    """What the worker of a mirror waits for: somebody has canceled it."""
    return f"{mirror_id} canceled"


def asked_topic(kind: str) -> str:
    """What those who do the mirror's part of an operation of this kind wait for."""
    return f"{kind} asked"


KEEPERS_WORK: Final = asked_topic("verification")  # told as well of damage that was found


class Topic:
    """Something that changes. ``changes`` counts them for as long as anybody holds this."""

    def __init__(self) -> None:
        self.changes = 0
        self._next = asyncio.Event()

    def change(self) -> None:
        """Wake everybody who waits."""
        self.changes += 1
        self._next.set()
        self._next = asyncio.Event()

    async def changed(self, since: int, timeout_seconds: float) -> bool:
        """Wait until there were more changes than ``since``; False when the time ran out.

        Read ``changes`` before you look: what changes while you look is then not missed.
        """
        if self.changes == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._next.wait()
        return self.changes != since


_LOOK_AGAIN_SECONDS: Final = 0.5
_TOLD_AGAIN_SECONDS: Final = 5.0  # a process of a version before tells nobody


class Watch:
    """Topics by their names, such as a mirror's id. One event loop.

    ``others_within``: the seconds within which this process is told what others change; 0 is at once, infinity never.
    """

    def __init__(self) -> None:
        self._topics: WeakValueDictionary[str, Topic] = WeakValueDictionary()
        self.stopping = False
        self.others_within = math.inf

    def topic(self, name: str) -> Topic:
        """The one that all who hold it share. What changes while nobody holds it is not counted: look afterwards."""
        return self._topics.setdefault(name, Topic())

    def names(self) -> list[str]:
        """What somebody here waits for."""
        return list(self._topics)

    def notify(self, name: str) -> None:
        """Wake everybody here who waits for this topic."""
        if (topic := self._topics.get(name)) is not None:
            topic.change()

    def notify_all(self) -> None:
        """Wake everybody here: nobody knows what has changed."""
        for topic in list(self._topics.values()):
            topic.change()

    def stop(self) -> None:
        """Wake everybody, now and from now on: the service ends, and open requests shall be answered with what is known."""
        self.stopping = True
        self.notify_all()

    @property
    def again_seconds(self) -> float:
        """After which whoever waits looks again, though nobody has told him of a change."""
        return _LOOK_AGAIN_SECONDS if math.isinf(self.others_within) else _TOLD_AGAIN_SECONDS

    async def look_until(
        self,
        name: str,
        look: Callable[[], Awaitable[_Seen]],
        is_over: Callable[[_Seen], bool],
        wait_seconds: float,
        *,
        first: Callable[[], Awaitable[_Seen]] | None = None,
        again_seconds: float | None = None,
    ) -> _Seen:
        """What ``look`` saw last. It looks at once, at changes, and every ``again_seconds``, while there is time.

        ``first`` is another way to look for the first time.
        """
        deadline = time.monotonic() + wait_seconds
        topic = self.topic(name)
        changes = topic.changes
        seen = await (first or look)()
        while not is_over(seen) and not self.stopping and (left := deadline - time.monotonic()) > 0:
            await topic.changed(changes, min(left, self.again_seconds if again_seconds is None else again_seconds))
            changes = topic.changes
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
    """What ``read`` returned, at most ``seconds`` ago, and since the last change of the topic.

    ``seconds`` may depend on the result. ``forget`` is a change that this read alone is told of.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[_Result]],
        seconds: float | Callable[[_Result], float],
        clock: Callable[[], float] = time.monotonic,
        topic: Topic | None = None,
    ) -> None:
        self._read = read
        self._seconds: Callable[[_Result], float] = seconds if callable(seconds) else lambda _: seconds
        self._clock = clock
        self._topic = topic or Topic()
        self._result: tuple[float, int, _Result] | None = None  # when it was begun, and after how many changes
        self._failure: tuple[float, Exception] | None = None
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Something changed: every later ``get`` sees it, also when a read is under way at this moment."""
        self._topic.change()

    async def get(self, *, anew: bool = False) -> _Result:
        """One caller reads; the others wait for the result, or for the exception of ``read``.

        ``anew`` is for a caller that has heard of a change elsewhere: a read that began before this call is too old for it. Of
        many that heard at once, the first reads, and the second reads for all others. A result is never too old for a caller
        that asked before the read began, however long the read takes.
        """
        asked = self._clock()
        async with self._lock:
            if self._result is not None:
                began, changes, result = self._result
                oldest = asked if anew else min(asked, self._clock() - self._seconds(result))
                if began >= oldest and changes == self._topic.changes:
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
            if 0 < (seconds := self._seconds(result)) < math.inf:
                # Whoever asks next shall find it, though nobody holds it in between.
                asyncio.get_running_loop().call_later(seconds, self._lapse, began)
            return result

    def _lapse(self, began: float) -> None:
        if self._result is not None and self._result[0] == began:
            self._result = None


class ThreadRead(Generic[_Result]):
    """A read that blocks, in one thread at a time. Who asks while it is under way waits for it, also when an earlier one has gone."""

    def __init__(self, read: Callable[[], _Result]) -> None:
        self._read = read
        self._under_way: asyncio.Future[_Result] | None = None

    async def get(self) -> _Result:
        """What it returns or raises."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(asyncio.to_thread(self._read))
        return await asyncio.shield(self._under_way)


class SharedReads(Generic[_Key, _Result]):
    """One shared read for each key, for as long as somebody holds it or its result is good. ``seconds`` as of ``SharedRead``."""

    def __init__(self, seconds: float | Callable[[_Result], float]) -> None:
        self._seconds = seconds
        self._held: WeakValueDictionary[_Key, SharedRead[_Result]] = WeakValueDictionary()

    def of(self, key: _Key, read: Callable[[], Awaitable[_Result]], topic: Topic | None = None) -> SharedRead[_Result]:
        """The read that all callers with this key share. Equal keys have equal ``read`` and ``topic``."""
        return self._held.setdefault(key, SharedRead(read, self._seconds, topic=topic))

    def __len__(self) -> int:
        """How many keys are in use."""
        return len(self._held)


_ANSWER_SECONDS: Final = 30.0


def answer_of(loop: asyncio.AbstractEventLoop, answer: Coroutine[Any, Any, _Result]) -> _Result:
    """For a thread: the answer of ``loop``, when it comes in time. The loop finishes also what comes too late. Raises ``StoreUnavailableError``."""
    try:
        return asyncio.run_coroutine_threadsafe(answer, loop).result(_ANSWER_SECONDS)
    except TimeoutError:
        raise StoreUnavailableError(f"no answer within {_ANSWER_SECONDS:g} s") from None
