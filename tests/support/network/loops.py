"""Turns of an event loop, and servers on one in a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

_Result = TypeVar("_Result")
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def settle() -> None:
    """Every task goes as far as it can without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class LoopThread:
    """From ``with`` until its end, when its servers are closed and whatever still runs there is canceled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What it returns, there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def listen(self, accept: Accept, host: str = "127.0.0.1", port: int = 0, **options: Any) -> int:
        """The port on which ``accept`` is called for every connection from now on."""
        server = self.run(asyncio.start_server(accept, host, port, **options))
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def deafen(self) -> None:
        """Nothing listens any more."""
        while self._servers:
            self._loop.call_soon_threadsafe(self._servers.pop().close)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.01)  # for the transports to close
