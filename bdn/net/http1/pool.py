"""Persistent HTTP connections for byte threads: plain blocking sockets, so that a body lands in our buffer in one copy.

docs/adr/0010 has the figures: why no asyncio client carries bytes. ``http1`` says why ``http.client`` does not.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from bdn.core.egress.rules import EgressPolicy
from bdn.net.http1.connection import NoAnswerError, Wire
from bdn.net.http1.deadlines import Patience
from bdn.net.http1.dialing import Dialer
from bdn.net.http1.exchange import Answer, ask
from bdn.net.http1.head import ProtocolError
from bdn.net.http1.request import Origin, format_get, split_address

NETWORK_ERRORS: Final = (
    OSError,
    ProtocolError,
    ValueError,
)  # ValueError: an address or header nobody can send


class ConnectionPool:
    """Idle connections by origin. A connection is used by one thread at a time and kept only after a clean answer.

    ``idle_limit`` bounds the idle ones of all origins together; those of the origin that was not used for longest go first.
    ``egress`` says where connections may lead; None is for our own services.
    """

    def __init__(self, *, timeout_seconds: float, idle_limit: int = 256, egress: EgressPolicy | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._idle_limit = idle_limit
        self._dialer = Dialer(timeout_seconds, egress)
        self._idle: dict[Origin, list[Wire]] = {}  # the origin used last stands last
        self._idle_count = 0
        self._busy: set[Wire] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    @contextmanager
    def get(
        self, url: str, headers: Mapping[str, str], expected: int = 0, patience: Patience | None = None
    ) -> Iterator[Answer]:
        """Send a GET and yield the answer's head; the caller reads the body, of about ``expected`` bytes where that is known.

        ``patience`` judges the wait for an answer to begin, instead of the pool's timeout.

        The connection is kept when the body was read to its end, and closed otherwise. An idle connection that the server
        closed meanwhile is replaced once, silently: nothing of the answer had arrived (RFC 9110, section 9.2.2).

        Raises:
            NETWORK_ERRORS: whatever the network does; see ``reason_of``.
            EgressRefusedError: the address may not be contacted.
        """
        origin, target = split_address(url)
        request = format_get(origin, target, headers)
        wire, is_reused = self._take(origin)
        keep = False
        try:
            try:
                answer = ask(wire, request, self._timeout_seconds, expected, patience)
            except NoAnswerError:
                if not is_reused or self._is_closed:
                    raise
                self._give_back(origin, wire, keep=False)
                wire = self._connect(origin)
                answer = ask(wire, request, self._timeout_seconds, expected, patience)
            yield answer
            keep = answer.keeps_alive
        finally:
            self._give_back(origin, wire, keep=keep)

    def close(self) -> None:
        """Close every idle connection, and break those in use: their readers fail now, not when their time is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle, self._idle_count = self._idle, {}, 0
            for wire in self._busy:
                with suppress(OSError):
                    wire.break_off()
        for wires in idle.values():
            for wire in wires:
                wire.close()

    def _take(self, origin: Origin) -> tuple[Wire, bool]:
        with self._lock:
            idle = self._idle.get(origin)
            if idle:
                wire = idle.pop()
                self._idle_count -= 1
                if not idle:
                    del self._idle[origin]
                self._busy.add(wire)
                return wire, True
        return self._connect(origin), False

    def _give_back(self, origin: Origin, wire: Wire, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(wire)
            if keep and self._idle_limit and not self._is_closed:
                dropped = self._drop_oldest() if self._idle_count >= self._idle_limit else None
                idle = self._idle.pop(origin, [])
                idle.append(wire)
                self._idle[origin] = idle
                self._idle_count += 1
            else:
                dropped = wire
        if dropped is not None:
            dropped.close()

    def _drop_oldest(self) -> Wire:
        origin, idle = next(iter(self._idle.items()))
        oldest = idle.pop(0)
        if not idle:
            del self._idle[origin]
        self._idle_count -= 1
        return oldest

    def _connect(self, origin: Origin) -> Wire:
        self._check_open()
        wire = self._dialer.connect(origin)
        try:
            with self._lock:
                self._check_open()  # again: ``close`` could not see this one
                self._busy.add(wire)
        except ConnectionAbortedError:
            wire.close()
            raise
        return wire

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
