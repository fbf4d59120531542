"""TLS in front of a server, as an operator's proxy ends it or around played answers, and a CONNECT proxy."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from threading import Thread

from tests.support.network.raw_server import Play, RawServer, read_head


def over_tls(context: ssl.SSLContext, play: Play) -> Play:
    """The play behind a TLS handshake."""

    def secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as encrypted:
            play(encrypted)

    return secured


class ConnectProxy(RawServer):
    """Answers ``CONNECT`` with a tunnel to ``target``, whatever name was asked for. ``heads`` is what it was sent."""

    def __init__(self, target: tuple[str, int], *, refuse: bytes = b"", connections: int = 1) -> None:
        super().__init__(*[self._play] * connections)
        self._target = target
        self._refuse = refuse
        self.heads: list[str] = []

    @property
    def asked_for(self) -> list[str]:
        """``host:port`` of every CONNECT."""
        return [head.split(" ")[1] for head in self.heads if head.startswith("CONNECT ")]

    def _play(self, client: socket.socket) -> None:
        self.heads.append(read_head(client).decode())
        if self._refuse:
            client.sendall(self._refuse)
            return
        with socket.create_connection(self._target) as server:
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = Thread(target=_pump, args=(server, client))
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until the source ends; then the sink hears the end too."""
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


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
