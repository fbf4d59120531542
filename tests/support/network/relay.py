"""A TCP relay that is far away and loses connections: what a kernel without ``netem`` cannot do to packets."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence

from tests.support.network.loops import Accept, LoopThread

_PIECE = 256 * 1024
_WINDOW = 64  # pieces under way in one direction of one connection


@contextlib.contextmanager
def relaying(
    address: str, host: str, ports: Sequence[int], delay_seconds: float, cut_after: int = 256 * 1024**2
) -> Iterator[None]:
    """While the context lasts, ``address`` stands for ``host`` on these ports.

    Every byte is ``delay_seconds`` under way; a connection is cut after ``cut_after`` bytes of answers.
    """

    def accepting(port: int) -> Accept:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_carry(reader, back, delay_seconds, sys.maxsize))
                    group.create_task(_carry(there, writer, delay_seconds, cut_after))
            except* OSError:
                pass  # one side has gone; so does the other
            finally:
                writer.transport.abort()
                back.transport.abort()

        return accept

    with LoopThread() as loop:
        for port in ports:
            loop.listen(accepting(port), address, port)
        yield


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_seconds: float, limit: int) -> None:
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW)
    loop = asyncio.get_running_loop()

    async def take() -> None:
        piece = b"."
        while piece:
            piece = await source.read(_PIECE)
            await under_way.put((loop.time() + delay_seconds, piece))

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
