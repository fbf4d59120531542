"""A proxy in front of several replicas, as a load balancer is: each connection goes to the first one that accepts it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

_PIECE = 64 * 1024


@asynccontextmanager
async def balancing(ports: Sequence[int]) -> AsyncIterator[str]:
    """The address of the proxy, until the block ends."""

    clients: set[asyncio.StreamWriter] = set()

    async def carry(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        clients.add(to_client)
        for port in ports:
            with suppress(OSError):
                server, to_server = await asyncio.open_connection("127.0.0.1", port)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_pump(client, to_server))
                        group.create_task(_pump(server, to_client))
                finally:
                    to_server.close()
                break
        to_client.close()
        clients.discard(to_client)

    listener = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for client in clients:
            client.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
    sink.close()
