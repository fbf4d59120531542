"""One piece of work at a time per key, whoever asks: others wait for its result.

When the leader fails or is canceled, its failure is its own; a waiter takes over and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Flights(Generic[_Result]):
    """Work in progress by key. A result stays until ``forget``: the caller says when others can find it elsewhere."""

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Future[_Result]] = {}
        self._followers: list[_Follower] = []

    async def run(self, key: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
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

    def lead(self, key: str) -> bool:
        """Whether nobody is at work on this, nor has been; then it is the caller's to ``land`` or to ``give_up``."""
        # A looks and sees nothing; B looks and sees nothing; but between the look and the entry there is no await, so one
        # of them enters first and the other sees it.
        if key in self._flights:
            return False
        self._flights[key] = asyncio.get_running_loop().create_future()
        return True

    def land(self, key: str, result: _Result) -> None:
        """What the caller leads is done."""
        self._flights[key].set_result(result)

    def give_up(self, key: str) -> None:
        """What the caller leads will not be done: somebody who waits for it takes over."""
        self._flights.pop(key).cancel()

    def forget(self, keys: Collection[str], owner: str) -> None:
        """These results can be found elsewhere now, or nowhere any more. Work that is under way stays.

        A leads, B waits, both have the result, A forgets it; C finds nothing and leads again; B forgets what A did, and
        must not take C's entry away.
        """
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None and flight.done():
                del self._flights[key]
        own = [follower for follower in self._followers if follower.owner == owner]
        for follower in self._followers:
            if follower not in own or len(own) > 1:  # who is alone knows what it brought itself
                follower.landed.update(keys)

    @contextmanager
    def following(self, owner: str) -> Iterator[set[str]]:
        """The keys that others forget during the block: what a look elsewhere, made inside it, may have missed."""
        follower = _Follower(owner)
        self._followers.append(follower)
        try:
            yield follower.landed
        finally:
            self._followers.remove(follower)


@dataclass(eq=False)
class _Follower:
    owner: str
    landed: set[str] = field(default_factory=set)
