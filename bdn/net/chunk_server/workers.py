"""A bounded number of threads that do what may block: ask the shelf, and read from the disk into sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

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
        """Let the threads end after what was put before. Says whether they did; a thread that does not is let go."""
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
