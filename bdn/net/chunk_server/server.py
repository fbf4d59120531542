"""The data plane's server: chunks by name, straight from files to sockets with ``sendfile``.

It does not go through uvicorn, which costs a factor of four to eight (docs/adr/0010). It has no thread per connection
either: one that waits (for a request, a slow reader, a chunk on its way) waits in ``epoll`` and costs 2 KB.

    accept → poller → worker: advance until it would block → poller …
"""

from __future__ import annotations

import errno
import logging
import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from bdn.net.api_server.http_server import bind_tcp
from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.poller import Poller
from bdn.net.chunk_server.sending import Pace, Wait
from bdn.net.chunk_server.served_chunks import ServedChunks, ServedDocuments

logger = logging.getLogger(__name__)
_WORKERS: Final = 32  # so many readings from the disk at once
_LINGER_MILLISECONDS: Final = 2
_ACCEPTED_AT_ONCE: Final = 64
_SPARE_DESCRIPTORS: Final = 256  # for everything else that the process has open
_LOOKUP_SECONDS: Final = 35.0  # for look-ups under way at the end: the mirror's wait 30 s for its database
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_Item = TypeVar("_Item")


class Workers(Generic[_Item]):
    """Calls ``work`` with each item, in the order in which they were put. Threads are made when they are first needed."""

    def __init__(self, work: Callable[[_Item], None], limit: int, name: str) -> None:
        self._work = work
        self._limit = limit
        self._name = name
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    @property
    def are_behind(self) -> bool:
        """Whether some item waits for a thread."""
        return not self._queue.empty()

    def put(self, item: _Item) -> None:
        """Have ``work`` called with ``item`` soon."""
        with self._lock:
            if self._is_closed:
                return
            self._idle -= 1  # below zero: so many items have no thread yet
            if self._idle < 0 and len(self._threads) < self._limit:
                self._idle += 1
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put(item)

    def close(self, timeout_seconds: float) -> bool:
        """Let the threads end after what was put before. Says whether they did; a thread that does not is left behind."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(item)
            with self._lock:
                self._idle += 1


class ChunkServer:
    """Listens from construction on and serves from ``start`` until ``close``.

    ``on_sent`` is told the bytes of each body, by any thread. ``pace``, called by any thread, is given the size of a piece and
    returns the seconds to wait before it goes out. ``documents`` has manifests, if any are served here. Clients above
    ``connections``, or above what the process's limit of descriptors allows, are hung up on at once, so that they go to
    another source.
    """

    def __init__(
        self,
        chunks: ServedChunks,
        host: str,
        port: int,
        *,
        on_sent: Callable[[int], None] | None = None,
        timeouts: Timeouts | None = None,
        pace: Pace | None = None,
        documents: ServedDocuments | None = None,
        connections: int = 4096,
    ) -> None:
        self._service = Service(chunks, on_sent or _ignore, timeouts or Timeouts(), pace, documents)
        self._limit = min(connections, _affordable_connections())
        self._listener = bind_tcp(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._workers: Workers[ChunkConnection] = Workers(self._serve, _WORKERS, "chunk-worker")
        self._poller = Poller(self._listener, self._accept, self._workers.put)
        self._thread = threading.Thread(target=self._poller.run, name="chunk-server", daemon=True)
        self._open: set[ChunkConnection] = set()
        self._is_closed = False

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, break off every answer and end every thread. Blocks while a look-up is under way."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._poller.stop():
            self._end(connection)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        for connection in tuple(self._open):
            connection.shut_down()
        if not self._workers.close(_LOOKUP_SECONDS):
            logger.error("the look-up of a chunk has not returned; its thread is left behind")
        self._poller.close()

    def _accept(self) -> bool:
        """Accept clients. False: there are no descriptors left."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    logger.warning("a chunk client is not accepted", extra={"reason": str(error)})
                    return False
                continue  # the client was gone before it was accepted (accept(2))
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
        if not self._poller.add(client, client.first_wait):
            self._end(client)

    def _serve(self, connection: ChunkConnection) -> None:
        """Advance a connection in a worker, and hand it back to the poller."""
        while (wait := connection.advance()) is not None:
            if not self._is_back_soon(connection, wait):
                if not self._poller.add(connection, wait):
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
