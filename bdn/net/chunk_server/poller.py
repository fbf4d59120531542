"""Where connections wait: one thread for all of them, in ``epoll``.

A connection is either here or with a worker, never both. Its events are armed for one shot and by the worker itself, so that
adding it wakes nobody up.
"""

from __future__ import annotations

import heapq
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from bdn.net.chunk_server.connection import ChunkConnection
from bdn.net.chunk_server.sending import Wait

logger = logging.getLogger(__name__)
_SHORTAGE_PAUSE_SECONDS: Final = 0.2  # without descriptors to spare, before the next client is let in


@dataclass(slots=True)
class Timers:
    """One moment per key. Moving it later costs nothing: its entry in the heap is corrected when it comes up.

    So a connection that waits after each of a thousand answers, for 60 s each time, has one entry and not a thousand.
    """

    _moments: dict[int, float] = field(default_factory=dict)
    _heap: list[tuple[float, int]] = field(default_factory=list)
    _queued: dict[int, float] = field(default_factory=dict)  # the earliest entry of each key in the heap

    def set(self, key: int, moment: float) -> None:
        """Forget what was set for this key before."""
        self._moments[key] = moment
        if moment < self._queued.get(key, float("inf")):
            self._queued[key] = moment
            heapq.heappush(self._heap, (moment, key))

    def clear(self, key: int) -> None:
        """Nothing is to happen for this key; fine when nothing was."""
        self._moments.pop(key, None)

    @property
    def next(self) -> float | None:
        """Nothing is due before this moment. That something is due then is not said."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[int]:
        """The keys whose moment has come, which are cleared."""
        keys = []
        while self._heap and self._heap[0][0] <= now:
            queued, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # an earlier entry took its place
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
    """Calls ``ready`` with every connection that something has happened to, and ``accept`` when clients want to connect.

    ``accept`` returns whether to go on listening at once; otherwise it is called again after a pause.
    """

    def __init__(
        self, listener: socket.socket, accept: Callable[[], bool], ready: Callable[[ChunkConnection], None]
    ) -> None:
        self._accept = accept
        self._ready = ready
        self._listener = listener.fileno()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: dict[int, ChunkConnection] = {}
        self._timers = Timers()
        self._wakes_at = 0.0  # the thread looks at its timers then; infinity while none is set
        self._is_closed = False
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    def add(self, connection: ChunkConnection, wait: Wait) -> bool:
        """Watch a connection, from any thread. After True the caller must not touch it: another thread may have it by now.

        False: the caller still owns it and closes it, because this has stopped or the kernel refuses to watch it.
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
            self._wake()
        if wait.future is not None:
            self._watch(wait.future, descriptor, is_new=is_new)
        return True

    def run(self) -> None:
        """Watch until ``stop``: what the thread does."""
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
        """Let ``run`` end. Returns the connections that were here; the caller closes them."""
        with self._lock:
            self._is_closed = True
            parked = list(self._waiting.values())
            self._waiting.clear()
        self._wake()
        return parked

    def close(self) -> None:
        """Close the descriptors, after ``run`` has ended."""
        self._epoll.close()
        os.close(self._wakeup)

    def _arm(self, connection: ChunkConnection, events: int) -> bool:
        arm = self._epoll.modify if connection.is_watched else self._epoll.register
        try:
            arm(connection.fileno(), events | select.EPOLLONESHOT)
        except OSError as error:  # such as ENOSPC: the user's limit of watches
            logger.warning("a chunk client's connection cannot be watched", extra={"reason": str(error)})
            return False
        connection.is_watched = True
        return True

    def _watch(self, future: Future[object], descriptor: int, *, is_new: bool) -> None:
        """Resume a waiting connection when the future is done, or now if it is.

        Once per connection and future is enough. It may be done while a worker looks at the connection, which is not here then;
        but the worker adds it again, and this looks again. The callback knows the descriptor alone: for a client that
        has left it does nothing, and another client with that descriptor is advanced once for nothing.
        """
        if is_new:
            future.add_done_callback(lambda _: self._resume(descriptor))
        elif future.done():
            self._resume(descriptor)

    def _resume(self, descriptor: int) -> None:
        """Something has happened, or may have. Any thread; whoever is first gets the connection to a worker."""
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

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _seconds_to_sleep(self) -> float | None:
        with self._lock:
            moment = self._timers.next
            self._wakes_at = float("inf") if moment is None else moment
        return None if moment is None else max(0.0, moment - time.monotonic())
