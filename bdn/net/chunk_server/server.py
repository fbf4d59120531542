"""The data plane's server: chunks by name, straight from files to sockets with ``sendfile``.

It does not go through uvicorn, which costs a factor of four to eight (docs/adr/0010). Nor has it a thread
per connection: whoever waits (for a request, a slow reader, a chunk on its way) is parked in ``epoll`` and costs 2 KB.

    accept → parked → ready → worker: advance until it would block → parked …
"""

from __future__ import annotations

import errno
import logging
import resource
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from bdn.net.api_server.http_server import bind_tcp
from bdn.net.chunk_server.connection import ChunkConnection, Service
from bdn.net.chunk_server.poller import Parking
from bdn.net.chunk_server.sending import Pace, Wait
from bdn.net.chunk_server.served_chunks import ChunkShelf, DocumentShelf
from bdn.net.chunk_server.timeouts import Patience
from bdn.net.chunk_server.workers import Workers

logger = logging.getLogger(__name__)

_WORKERS: Final = 32  # so many readings from the disk at once
_LINGER_MILLISECONDS: Final = 2
_ACCEPTED_AT_ONCE: Final = 64
_SPARE_DESCRIPTORS: Final = 256  # for everything else that the process has open
_SHELF_SECONDS: Final = 35.0  # a shelf's call under way at the end: the mirror's waits 30 s for its database
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ChunkServer:
    """Listens from construction on and serves from ``start`` until ``close``.

    ``on_sent`` is told the bytes of each body, by any thread. ``pace``, called by any thread, is given the size of a piece and
    returns the seconds to wait before it goes out. ``documents`` has manifests, if any are served here. Clients above
    ``connections``, or above what the process's limit of descriptors allows, are hung up on at once, so that they go to
    another source.
    """

    def __init__(
        self,
        shelf: ChunkShelf,
        host: str,
        port: int,
        *,
        on_sent: Callable[[int], None] | None = None,
        patience: Patience | None = None,
        pace: Pace | None = None,
        documents: DocumentShelf | None = None,
        connections: int = 4096,
    ) -> None:
        self._service = Service(shelf, on_sent or _ignore, patience or Patience(), pace, documents)
        self._limit = min(connections, _affordable_connections())
        self._listener = bind_tcp(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._workers: Workers[ChunkConnection] = Workers(self._serve, _WORKERS, "chunk-worker")
        self._parking = Parking(self._listener, self._accept, self._workers.put)
        self._thread = threading.Thread(target=self._parking.run, name="chunk-server", daemon=True)
        self._open: set[ChunkConnection] = set()
        self._is_closed = False

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, break off every answer and end every thread. Blocks while the shelf is still asked something."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._parking.stop():
            self._end(connection)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        for connection in tuple(self._open):
            connection.shut_down()
        if not self._workers.close(_SHELF_SECONDS):
            logger.error("a chunk shelf has not answered; its thread is left behind")
        self._parking.close()

    def _accept(self) -> bool:
        """Let clients in. False: there are no descriptors left."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    logger.warning("a chunk client is not let in", extra={"reason": str(error)})
                    return False
                continue  # the client was gone before it was let in (accept(2))
            if len(self._open) >= self._limit:
                connection.close()
                continue
            self._admit(connection)
        return True

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = ChunkConnection(connection, self._service)
        self._open.add(client)
        if not self._parking.park(client, client.first_wait):
            self._end(client)

    def _serve(self, connection: ChunkConnection) -> None:
        """What a worker does with a connection that something has happened to."""
        while (wait := connection.advance()) is not None:
            if not self._is_back_soon(connection, wait):
                if not self._parking.park(connection, wait):
                    self._end(connection)
                return
        self._end(connection)

    def _is_back_soon(self, connection: ChunkConnection, wait: Wait) -> bool:
        """Wait a moment where nobody else needs the worker: a busy client's next request is shorter away than ``epoll``."""
        if not wait.events & (select.EPOLLIN | select.EPOLLOUT) or self._workers.are_behind:
            return False
        poll = select.poll()
        poll.register(connection, wait.events)
        return bool(poll.poll(_LINGER_MILLISECONDS))

    def _end(self, connection: ChunkConnection) -> None:
        connection.close()
        self._open.discard(connection)


def _ignore(_: int) -> None:
    """Nobody counts."""


def _affordable_connections() -> int:
    """Each one that is served has a socket and a file open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(16, (soft - _SPARE_DESCRIPTORS) // 2)
