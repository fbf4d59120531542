"""Requests as they come over a socket that never blocks: in one piece, in many, several at once, or not at all."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from bdn.net.chunk_server.head import RequestHead, find_head, parse_head
from bdn.net.chunk_server.sending import EndedError, Wait
from bdn.net.chunk_server.timeouts import Patience

RECEIVE_BYTES = 64 * 1024


class RequestReader:
    """Keeps what has come and is not yet answered: less than a head and what one ``recv`` brings."""

    __slots__ = ("_clock", "_patience", "_received", "_searched", "_until")

    def __init__(self, patience: Patience, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self._received = bytearray()
        self._searched = 0  # bytes in which no head ends
        self._until = clock() + patience.idle_seconds

    @property
    def wait(self) -> Wait:
        """What to wait for while there is no whole head."""
        return Wait(select.EPOLLIN, self._until)

    def turn(self) -> bool:
        """A request was answered: time for the next one begins. Whether some of it is here."""
        has_begun = bool(self._received)
        self._until = self._clock() + (self._patience.head_seconds if has_begun else self._patience.idle_seconds)
        return has_begun

    def read(self, connection: socket.socket) -> RequestHead | Wait:
        """The next head, or what to wait for.

        Raises:
            RequestRefusedError: it is malformed.
            EndedError: the client has closed the connection, says nothing, or dribbles.
        """
        while (end := self._find_head()) < 0:
            try:
                piece = connection.recv(RECEIVE_BYTES)
            except BlockingIOError:
                if self._clock() >= self._until:
                    raise EndedError("the client says nothing, or too slowly") from None
                return self.wait
            if not piece:
                raise EndedError("the client has closed it")
            if not self._received:
                self._until = self._clock() + self._patience.head_seconds
            self._received += piece
        content = bytes(self._received[:end])
        del self._received[:end]
        self._searched = 0
        return parse_head(content)

    def _find_head(self) -> int:
        while self._received.startswith(b"\r\n"):  # RFC 9112, section 2.2: some clients end a body with one too many
            del self._received[:2]
        end = find_head(self._received, self._searched)
        self._searched = len(self._received)
        return end
