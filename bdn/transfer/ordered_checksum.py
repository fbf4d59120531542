"""Whole-file checksums that need the bytes in order, over chunks that arrive out of order.

A chunk that arrives when it is its turn is hashed while it is in memory. One that comes early may wait a little for its turn,
in its byte thread and with its buffer; when that takes too long, it is left out, and so is everything behind it: the caller
reads the rest back from the store in the end. So the common case reads nothing twice, and no case holds a thread for long.
"""

from __future__ import annotations

import threading

from bdn.core.ports import Buffer
from bdn.core.source.upstream import Checksum
from bdn.transfer.checksums import RunningChecksum


class OrderedChecksum:
    """Shared by the byte threads that bring one file's chunks. The chunks are numbered from 0."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._running = RunningChecksum(expected, size)
        self._next = 0
        self._is_busy = False  # somebody hashes chunk ``_next``, without holding the lock
        self._is_over = False
        self._turn = threading.Condition()

    @property
    def next_index(self) -> int:
        """The first chunk that was not taken."""
        with self._turn:
            return self._next

    def offer(self, index: int, content: Buffer, wait_seconds: float) -> bool:
        """Take chunk ``index`` if its turn is now or comes in ``wait_seconds``; returns whether it is taken.

        A chunk that was taken before, and had to be fetched once more because it could not be stored, is not taken twice.
        The GIL is released while it is hashed; others may offer, wait and leave meanwhile.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._is_over or index <= self._next, wait_seconds)
            # Two threads may hold the same chunk, when a fetch was given up as lost and was not: the second one waits.
            while self._is_busy and index == self._next:
                self._turn.wait()
            if index < self._next:
                return True
            if self._is_over or index != self._next:
                return False
            self._is_busy = True
        taken = 0
        try:
            self._running.update(content)
            taken = 1
        finally:
            with self._turn:
                self._is_busy = False
                self._next += taken
                self._turn.notify_all()
        return True

    def hand_over(self) -> tuple[int, RunningChecksum]:
        """No chunk is taken from now on, and nobody waits. Go on with the bytes of the returned chunk and those after it.

        When that is the number of chunks, there is nothing left but to check.
        """
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
            while self._is_busy:
                self._turn.wait()
            return self._next, self._running
