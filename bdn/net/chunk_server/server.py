"""The data plane's server: chunks by name, straight from files to sockets with ``sendfile``.

It does not use uvicorn, which is four to eight times slower (docs/adr/0010), and has no thread per connection: a
connection that waits (for a request, a slow reader, a chunk being fetched) waits in ``epoll`` and costs 2 KB.

    accept → poller → worker: advance until it would block → poller …
"""

import heapq
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from bdn.core.pace.shares import Place, Shares
from bdn.net.admission import Admission, network_of
from bdn.net.api_server import SHORTAGES, bind_tcp
from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.receiving import BUFFERS, ReceiveBuffers
from bdn.net.chunk_server.sending import NEXT_TURN, Pace, Wait
from bdn.net.chunk_server.served_chunks import ReceivedChunks, ServedChunks
from bdn.net.descriptors import connection_limit
from bdn.net.tls import Certificate

logger = logging.getLogger(__name__)
_SHORTAGE_PAUSE_SECONDS: Final = 0.2  # without free descriptors, before the next accept
_WORKERS: Final = 96  # one organisation gets at most half of them, however slow a store is
_LINGER_MILLISECONDS: Final = 2
_ACCEPTED_AT_ONCE: Final = 64
_LOOKUP_SECONDS: Final = 35.0  # for look-ups in progress at the end: the mirror's wait 30 s for its database


@dataclass(slots=True)
class Timers:
    """One deadline per key. Postponing costs nothing: the heap entry is corrected when it is due.

    So a connection that waits after each of a thousand responses, for 60 s each time, has one entry and not a thousand.
    """

    _moments: dict[int, float] = field(default_factory=dict)
    _heap: list[tuple[float, int]] = field(default_factory=list)
    _queued: dict[int, float] = field(default_factory=dict)  # each key's earliest heap entry

    def set(self, key: int, moment: float) -> None:
        """Set or replace the deadline of a key."""
        self._moments[key] = moment
        if moment < self._queued.get(key, float("inf")):
            self._queued[key] = moment
            heapq.heappush(self._heap, (moment, key))

    def clear(self, key: int) -> None:
        """Remove the deadline of a key, if any."""
        self._moments.pop(key, None)

    @property
    def next(self) -> float | None:
        """A lower bound: no deadline is earlier, but none may be due then."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[int]:
        """Remove and return the keys whose deadline has passed."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            queued, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # an earlier entry replaced it
            del self._queued[key]
            moment = self._moments.get(key)
            if moment is None:
                continue
            if moment <= now:
                del self._moments[key]
                keys.append(key)
            else:
                self.set(key, moment)
        return keys


class Poller:
    """Calls ``ready`` with each connection that has an event, and ``accept`` for new clients.

    ``accept`` returns whether to listen on at once; otherwise it is called again after a pause.
    """

    def __init__(
        self, listener: socket.socket, accept: Callable[[], bool], ready: Callable[[ChunkConnection], object]
    ) -> None:
        self._accept = accept
        self._ready = ready
        self._listener = listener.fileno()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: dict[int, ChunkConnection] = {}
        self._timers = Timers()
        self._wakes_at = 0.0  # when the thread next checks its timers; infinity without timers
        self._is_closed = False
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    def add(self, connection: ChunkConnection, wait: Wait) -> bool:
        """Watch a connection, from any thread.

        After True the caller must not touch it: another thread may own it already.

        Returns False when the poller has stopped or the kernel refuses the watch; then the caller still owns the
        connection.
        """
        descriptor = connection.fileno()
        with self._lock:
            if self._is_closed or not self._arm(connection, wait.events):
                return False
            is_new, connection.awaited = connection.awaited is not wait.future, wait.future
            self._waiting[descriptor] = connection
            self._timers.set(descriptor, wait.until)
            is_early = wait.until < self._wakes_at
        if is_early:
            os.eventfd_write(self._wakeup, 1)
        # One callback per connection and future is enough. A future may be done while a worker holds the connection,
        # which is not in the poller then; but the worker adds it again, and ``add`` checks the future again. The
        # callback holds only the descriptor: for a closed connection it does nothing, and a new client with the same
        # descriptor is advanced once in vain.
        if wait.future is not None and is_new:
            wait.future.add_done_callback(lambda _: self._resume(descriptor))
        elif wait.future is not None and wait.future.done():
            self._resume(descriptor)
        return True

    def withdraw_idle(self, connections: Iterable[ChunkConnection]) -> ChunkConnection | None:
        """Remove and return the first of these that waits here and is idle; None if none is.

        The caller owns it from now on.
        """
        for connection in connections:
            with self._lock:
                descriptor = connection.fileno()
                if self._waiting.get(descriptor) is connection and connection.is_idle:
                    del self._waiting[descriptor]
                    self._timers.clear(descriptor)
                    return connection
        return None

    def run(self) -> None:
        while not self._is_closed:
            for descriptor, _ in self._epoll.poll(self._seconds_to_sleep()):
                if descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
                elif descriptor == self._listener:
                    self._accept_clients()
                else:
                    self._resume(descriptor)
            with self._lock:
                due = self._timers.due(time.monotonic())
            for descriptor in due:
                if descriptor == self._listener:
                    self._epoll.modify(self._listener, select.EPOLLIN)
                else:
                    self._resume(descriptor)

    def stop(self) -> list[ChunkConnection]:
        """End ``run``. Returns the waiting connections; the caller closes them."""
        with self._lock:
            self._is_closed = True
            parked = list(self._waiting.values())
            self._waiting.clear()
        os.eventfd_write(self._wakeup, 1)
        return parked

    def close(self) -> None:
        """Close the descriptors. Call after ``run`` has ended."""
        self._epoll.close()
        os.close(self._wakeup)

    def _arm(self, connection: ChunkConnection, events: int) -> bool:
        arm = self._epoll.modify if connection.is_watched else self._epoll.register
        try:
            arm(connection.fileno(), events | select.EPOLLONESHOT)
        except OSError as error:  # such as ENOSPC: the user's limit of watches
            logger.warning("cannot poll a chunk client's connection; closing it", extra={"reason": str(error)})
            return False
        connection.is_watched = True
        return True

    def _resume(self, descriptor: int) -> None:
        """Pass a connection to a worker after a possible event. Callable from any thread; the first call wins."""
        with self._lock:
            connection = self._waiting.pop(descriptor, None)
            if connection is not None:
                self._timers.clear(descriptor)
        if connection is not None:
            self._ready(connection)

    def _accept_clients(self) -> None:
        if not self._accept():
            self._epoll.modify(self._listener, 0)
            with self._lock:
                self._timers.set(self._listener, time.monotonic() + _SHORTAGE_PAUSE_SECONDS)

    def _seconds_to_sleep(self) -> float | None:
        with self._lock:
            moment = self._timers.next
            self._wakes_at = float("inf") if moment is None else moment
        return None if moment is None else max(0.0, moment - time.monotonic())


class Workers:
    """Calls ``work`` with each connection, round robin over organisations. Creates threads when first needed.

    A stranger's turn counts for its address. A connection may be put again during its ``work``, for another turn.
    """

    def __init__(self, work: Callable[[ChunkConnection], None]) -> None:
        self._work = work
        self._shares = Shares(_WORKERS, spares=True)
        self._waiting: dict[Place, ChunkConnection] = {}
        self._queue: SimpleQueue[tuple[Place, ChunkConnection] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    @property
    def are_behind(self) -> bool:
        return bool(self._waiting) or not self._queue.empty()

    def put(self, connection: ChunkConnection) -> bool:
        """Queue a connection for ``work``, after its owner's earlier connections.

        Returns False once the threads are ending.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._waiting[self._shares.request(connection.owner)] = connection
            self._grant()
            return True

    def close(self, timeout_seconds: float) -> bool:
        """End the threads after all queued work. Returns False when a thread did not end in time; it is abandoned."""
        with self._lock:
            self._is_closed = True
            self._end_if_done()
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _grant(self) -> None:
        for place in self._shares.grant():
            self._idle -= 1  # below zero: the number of connections without a thread
            if self._idle < 0 and len(self._threads) < _WORKERS:
                self._idle += 1
                thread = threading.Thread(target=self._run, name=f"chunk-worker-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put((place, self._waiting.pop(place)))

    def _end_if_done(self) -> None:
        if self._is_closed and not self._waiting:
            for _ in self._threads:
                self._queue.put(None)

    def _run(self) -> None:
        while (turn := self._queue.get()) is not None:
            place, connection = turn
            self._work(connection)
            with self._lock:
                self._idle += 1
                self._shares.release(place)
                self._grant()
                self._end_if_done()


class ChunkServer:
    """Listens from construction and serves from ``start`` until ``close``.

    Any thread calls the callbacks. ``on_sent`` gets the bytes sent of each body, ``on_received`` the bytes received of
    each, whole or partial, right or wrong. ``pace`` gets the size of a piece and returns the seconds to wait before
    sending it. ``is_local``: no grants are required, so requests from foreign web pages are refused. ``received``
    stores pushed chunks, if accepted at all, from ``buffers`` of 8 MiB. With a ``certificate`` the server speaks only
    TLS. Above ``connections``, by default ``connection_limit``, a new client replaces the oldest idle connection
    without an authorised request, or else one of the organisation with most connections. If none is idle, the new
    connection is closed at once, so that its client uses another source.
    """

    def __init__(
        self,
        chunks: ServedChunks,
        host: str,
        port: int,
        *,
        on_sent: Callable[[int], None] | None = None,
        on_received: Callable[[int], None] | None = None,
        timeouts: Timeouts | None = None,
        pace: Pace | None = None,
        is_local: bool = False,
        certificate: Certificate | None = None,
        received: ReceivedChunks | None = None,
        buffers: int = BUFFERS,
        connections: int | None = None,
    ) -> None:
        self.buffers = ReceiveBuffers(buffers)
        limit = connection_limit() if connections is None else connections
        self._admission: Admission[ChunkConnection] = Admission(limit, self._end_idle)
        self._service = Service(
            chunks,
            on_sent or (lambda _: None),
            timeouts or Timeouts(),
            pace,
            is_local,
            certificate,
            received,
            self.buffers,
            on_received or (lambda _: None),
            self._admission.know,
        )
        self._listener = bind_tcp(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._workers = Workers(self._serve)
        self._poller = Poller(self._listener, self._accept, self._workers.put)
        self._thread = threading.Thread(target=self._poller.run, name="chunk-server", daemon=True)
        self._is_closed = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, break off every response and end every thread. Blocks while a look-up is in progress."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self._poller.stop():
            self._end(connection)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        for connection in self._admission.clients():
            connection.shut_down()
        if not self._workers.close(_LOOKUP_SECONDS):
            logger.error("a chunk look-up did not return at shutdown; abandoning its thread")
        self._poller.close()

    def _accept(self) -> bool:
        """Accept clients. Returns False when descriptors are exhausted."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in SHORTAGES:
                    logger.warning("cannot accept chunk clients now; they wait", extra={"reason": str(error)})
                    return False
                continue  # the client left before it was accepted (accept(2))
            self._admit(connection, network_of(peer[0]))
        return True

    def _end_idle(self, connections: Iterable[ChunkConnection]) -> bool:
        """Close the first of these that is idle. Returns False if none is."""
        idle = self._poller.withdraw_idle(connections)
        if idle is not None:
            self._end(idle)
        return idle is not None

    def _admit(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = ChunkConnection(connection, self._service, address)
        if not (self._admission.admit(client, address) and self._poller.add(client, client.first_wait)):
            self._end(client)

    def _serve(self, connection: ChunkConnection) -> None:
        """Advance a connection in a worker, and return it to the poller.

        A turn belongs to one owner: see ``Workers``.
        """
        owner = connection.owner
        while (wait := connection.advance()) is not None:
            if wait is NEXT_TURN:
                if connection.owner == owner and not self._workers.are_behind:
                    continue
                if self._workers.put(connection):
                    return
                break
            if not self._is_back_soon(connection, wait):
                if not self._poller.add(connection, wait):
                    self._end(connection)
                return
        self._end(connection)

    def _is_back_soon(self, connection: ChunkConnection, wait: Wait) -> bool:
        """Wait a moment if no connection needs the worker: a busy client's next request is faster than ``epoll``."""
        if not wait.events & (select.EPOLLIN | select.EPOLLOUT) or self._workers.are_behind:
            return False
        poll = select.poll()
        poll.register(connection, wait.events)
        return bool(poll.poll(_LINGER_MILLISECONDS))

    def _end(self, connection: ChunkConnection) -> None:
        connection.close()
        self._admission.leave(connection)
