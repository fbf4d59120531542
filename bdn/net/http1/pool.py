"""Persistent HTTP connections for byte threads: plain blocking sockets, so that a body lands in our buffer in one copy.

docs/adr/0010 has the figures: why no asyncio client carries bytes; docs/adr/0007 why ``http.client`` and h11 do not.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from bdn.core.egress import EgressPolicy
from bdn.net.http1.answer import Answer, AnswerDeadline, ask
from bdn.net.http1.connection import Connection, NoAnswerError, ProtocolError
from bdn.net.http1.dialing import Dialer
from bdn.net.http1.request import Origin, format_get, split_address

# ValueError: an address or a header that no request can hold.
NETWORK_ERRORS: Final = (OSError, ProtocolError, ValueError)


class ConnectionPool:
    """Idle connections by origin. A connection is used by one thread at a time and kept only after a clean answer.

    ``idle_limit`` bounds the idle ones of all origins together; those of the origin that was not used for longest go first.
    ``egress`` says where connections may lead; None is for our own services.
    """

    def __init__(self, *, timeout_seconds: float, idle_limit: int = 256, egress: EgressPolicy | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._idle_limit = idle_limit
        self._dialer = Dialer(timeout_seconds, egress)
        self._idle: dict[Origin, list[Connection]] = {}  # the origin used last stands last
        self._idle_count = 0
        self._busy: set[Connection] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    @contextmanager
    def get(
        self, url: str, headers: Mapping[str, str], expected: int = 0, deadline: AnswerDeadline | None = None
    ) -> Iterator[Answer]:
        """Send a GET and yield the answer's head; the caller reads the body, of about ``expected`` bytes where that is known.

        ``deadline`` judges the wait for an answer to begin, instead of the pool's timeout.

        The connection is kept when the body was read to its end, and closed otherwise. An idle connection that the server
        closed meanwhile is replaced once, silently: nothing of the answer had arrived (RFC 9110, section 9.2.2).

        Raises:
            NETWORK_ERRORS: whatever the network does; see ``reason_of``.
            EgressRefusedError: the address may not be contacted.
        """
        origin, target = split_address(url)
        request = format_get(origin, target, headers)
        connection, is_reused = self._acquire(origin)
        keep = False
        try:
            try:
                answer = ask(connection, request, self._timeout_seconds, expected, deadline)
            except NoAnswerError:
                if not is_reused or self._is_closed:
                    raise
                self._release(origin, connection, keep=False)
                connection = self._connect(origin)
                answer = ask(connection, request, self._timeout_seconds, expected, deadline)
            yield answer
            keep = answer.keeps_alive
        finally:
            self._release(origin, connection, keep=keep)

    def close(self) -> None:
        """Close every idle connection, and break those in use: their readers fail now, not when their time is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle, self._idle_count = self._idle, {}, 0
            for connection in self._busy:
                with suppress(OSError):
                    connection.break_off()
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _acquire(self, origin: Origin) -> tuple[Connection, bool]:
        with self._lock:
            idle = self._idle.get(origin)
            if idle:
                connection = idle.pop()
                self._idle_count -= 1
                if not idle:
                    del self._idle[origin]
                self._busy.add(connection)
                return connection, True
        return self._connect(origin), False

    def _release(self, origin: Origin, connection: Connection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and self._idle_limit and not self._is_closed:
                dropped = self._drop_oldest() if self._idle_count >= self._idle_limit else None
                idle = self._idle.pop(origin, [])
                idle.append(connection)
                self._idle[origin] = idle
                self._idle_count += 1
            else:
                dropped = connection
        if dropped is not None:
            dropped.close()

    def _drop_oldest(self) -> Connection:
        origin, idle = next(iter(self._idle.items()))
        oldest = idle.pop(0)
        if not idle:
            del self._idle[origin]
        self._idle_count -= 1
        return oldest

    def _connect(self, origin: Origin) -> Connection:
        self._check_open()
        connection = self._dialer.connect(origin)
        try:
            with self._lock:
                self._check_open()  # again: ``close`` could not see this one
                self._busy.add(connection)
        except ConnectionAbortedError:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "this program is ending")


def reason_of(error: Exception) -> str:
    """What the network did, without the address and the headers, which some messages repeat."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "an address or a header cannot be sent"
    return str(error) or type(error).__name__
