"""Where connections wait that have nothing to do: one thread for all of them, asleep in ``epoll``.

A connection is either here or with a worker, never both. Its events are armed for one shot and by the worker itself, so
parking wakes nobody up.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from bdn.net.chunk_server.connection import ChunkConnection
from bdn.net.chunk_server.sending import Wait
from bdn.net.chunk_server.timers import Timers

logger = logging.getLogger(__name__)

_BREATH_SECONDS: Final = 0.2  # without descriptors to spare, before the next client is let in


class Parking:
    """``ready`` gets every connection that something has happened to. ``accept`` is called when clients wait at the door.

    ``accept`` returns whether to go on listening at once; otherwise it is called again after a while.
    """

    def __init__(
        self, listener: socket.socket, accept: Callable[[], bool], ready: Callable[[ChunkConnection], None]
    ) -> None:
        self._accept = accept
        self._ready = ready
        self._door = listener.fileno()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._parked: dict[int, ChunkConnection] = {}
        self._timers = Timers()
        self._wakes_at = 0.0  # the thread looks at its timers then; infinity while none is set
        self._is_closed = False
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(self._door, select.EPOLLIN)

    def park(self, connection: ChunkConnection, wait: Wait) -> bool:
        """Take over a connection, from any thread. After True the caller leaves it alone: another may have it by now.

        False: it is still the caller's, who closes it; no connection is taken any more, or the kernel refuses to watch it.
        """
        descriptor = connection.fileno()
        with self._lock:
            if self._is_closed or not self._arm(connection, wait.events):
                return False
            is_new, connection.awaited = connection.awaited is not wait.future, wait.future
            self._parked[descriptor] = connection
            self._timers.set(descriptor, wait.until)
            is_early = wait.until < self._wakes_at
        if is_early:
            self._ring()
        if wait.future is not None:
            self._listen(wait.future, descriptor, is_new=is_new)
        return True

    def run(self) -> None:
        """Watch until ``stop``: what the thread does."""
        while not self._is_closed:
            for descriptor, _ in self._epoll.poll(self._seconds_to_sleep()):
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif descriptor == self._door:
                    self._open_door()
                else:
                    self._resume(descriptor)
            with self._lock:
                due = self._timers.due(time.monotonic())
            for descriptor in due:
                if descriptor == self._door:
                    self._epoll.modify(self._door, select.EPOLLIN)
                else:
                    self._resume(descriptor)

    def stop(self) -> list[ChunkConnection]:
        """Let ``run`` end and take no connection any more. Those that were here are the caller's."""
        with self._lock:
            self._is_closed = True
            parked = list(self._parked.values())
            self._parked.clear()
        self._ring()
        return parked

    def close(self) -> None:
        """Give the descriptors back, after ``run`` has ended."""
        self._epoll.close()
        os.close(self._bell)

    def _arm(self, connection: ChunkConnection, events: int) -> bool:
        arm = self._epoll.modify if connection.is_watched else self._epoll.register
        try:
            arm(connection.fileno(), events | select.EPOLLONESHOT)
        except OSError as error:  # such as ENOSPC: the user's limit of watches
            logger.warning("a chunk client's connection cannot be watched", extra={"reason": str(error)})
            return False
        connection.is_watched = True
        return True

    def _listen(self, future: Future[object], descriptor: int, *, is_new: bool) -> None:
        """Resume a parked connection when the future is done, or now if it is.

        Once per connection and future is enough. It may be done while a worker looks at the connection, which is not here then;
        but the worker parks it again, and this looks again. The callback knows the descriptor alone: a client that leaves
        costs nothing more, and another client with that descriptor is looked at in vain, once.
        """
        if is_new:
            future.add_done_callback(lambda _: self._resume(descriptor))
        elif future.done():
            self._resume(descriptor)

    def _resume(self, descriptor: int) -> None:
        """Something has happened, or may have. Any thread; whoever is first gets the connection to a worker."""
        with self._lock:
            connection = self._parked.pop(descriptor, None)
            if connection is not None:
                self._timers.clear(descriptor)
        if connection is not None:
            self._ready(connection)

    def _open_door(self) -> None:
        if not self._accept():
            self._epoll.modify(self._door, 0)
            with self._lock:
                self._timers.set(self._door, time.monotonic() + _BREATH_SECONDS)

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _seconds_to_sleep(self) -> float | None:
        with self._lock:
            moment = self._timers.next
            self._wakes_at = float("inf") if moment is None else moment
        return None if moment is None else max(0.0, moment - time.monotonic())
