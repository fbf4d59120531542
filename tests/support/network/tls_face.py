"""TLS in front of a server that speaks plain HTTP, as a proxy of the operator's ends it."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator

_PIECE = 256 * 1024


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
    sink.close()


@contextlib.contextmanager
def tls_face(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A port of this machine that is ``port`` behind TLS, until the block ends."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []
    stop = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_carry(reader, back), _carry(there, writer))
        finally:
            for end in (writer, back):
                end.transport.abort()

    async def serve() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)
        await asyncio.sleep(0.01)  # for the transports to close

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30), "TLS cannot be served"
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
