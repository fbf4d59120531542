"""A TCP relay that is far away and loses connections: what a kernel without ``netem`` cannot do to packets."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

_Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_PIECE = 256 * 1024
_WINDOW = 64  # pieces under way in one direction of one connection


@dataclass(frozen=True)
class Relay:
    """Every byte is ``delay_seconds`` under way; a connection is cut after ``cut_after`` bytes of answers."""

    host: str
    delay_seconds: float
    cut_after: int

    async def serve(self, address: str, ports: Sequence[int], ready: threading.Event, stop: asyncio.Event) -> None:
        """Listen on ``address``, with the same ports as ``host``, until ``stop``."""
        async with contextlib.AsyncExitStack() as stack:
            for port in ports:
                await stack.enter_async_context(await asyncio.start_server(self._accepting(port), address, port))
            ready.set()
            await stop.wait()
            carrying = asyncio.all_tasks() - {asyncio.current_task()}
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    def _accepting(self, port: int) -> _Accept:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(self.host, port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, back, sys.maxsize))
                    group.create_task(self._carry(there, writer, self.cut_after))
            except* OSError:
                pass  # one side has gone; so does the other
            finally:
                writer.transport.abort()
                back.transport.abort()

        return accept

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, limit: int) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW)
        loop = asyncio.get_running_loop()

        async def take() -> None:
            piece = b"."
            while piece:
                piece = await source.read(_PIECE)
                await under_way.put((loop.time() + self.delay_seconds, piece))

        async def give() -> None:
            carried = 0
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - loop.time())
                carried += len(piece)
                if carried > limit:
                    raise ConnectionResetError
                if not piece:
                    sink.write_eof()
                    return
                sink.write(piece)
                await sink.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())


@contextlib.contextmanager
def relaying(
    address: str, host: str, ports: Sequence[int], delay_seconds: float, cut_after: int = 256 * 1024**2
) -> Iterator[None]:
    """While the context lasts, ``address`` stands for ``host`` on these ports, in a thread of its own."""
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    relay = Relay(host, delay_seconds, cut_after)
    thread = threading.Thread(target=loop.run_until_complete, args=(relay.serve(address, ports, ready, stop),))
    thread.start()
    try:
        assert ready.wait(30), f"the relay cannot listen on {address}"
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
