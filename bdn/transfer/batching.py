"""Batches small requests from concurrent tasks into few large ones."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class Batched(Generic[_Item, _Answer]):
    """Batches the items of one event-loop iteration, or of the time of a running request; at most ``limit`` at once.

    ``ask`` returns answers in the order of items. Its error goes to all callers in the batch; canceling one caller
    affects no other.
    """

    def __init__(self, ask: Callable[[Sequence[_Item]], Awaitable[Sequence[_Answer]]], limit: int) -> None:
        self._ask = ask
        self._limit = limit
        self._waiting: list[tuple[_Item, asyncio.Future[_Answer]]] = []
        self._asking = asyncio.Lock()

    async def of(self, item: _Item) -> _Answer:
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        mine = (item, answer)
        self._waiting.append(mine)
        try:
            async with self._asking:
                while not answer.done():
                    await asyncio.sleep(0)  # let other ready tasks add their items
                    await self._ask_some()
            return await answer
        finally:
            self._waiting = [one for one in self._waiting if one is not mine]

    async def _ask_some(self) -> None:
        some, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
        try:
            answers = await self._ask([item for item, _ in some])
        except Exception as error:  # noqa: BLE001 - the error goes to the callers in the batch
            for _, answer in some:
                answer.set_exception(error)
        except BaseException:
            self._waiting = [*some, *self._waiting]
            raise
        else:
            for (_, answer), found in zip(some, answers, strict=True):
                answer.set_result(found)
