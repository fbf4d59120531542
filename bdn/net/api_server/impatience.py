"""Requests have to be whole in time: a client that says half of one, and no more, shall not hold a connection for ever.

uvicorn's own timeouts begin after an answer. The data plane's server has its own (``chunk_server/timers.py``).
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS: Final = 30.0  # for head and body, which is some megabytes at most
_IN_PART: Final = (h11.IDLE, h11.SEND_BODY)


class ImpatientProtocol(H11Protocol):
    """Hangs up on who takes longer than ``request_seconds`` for one request, from its first byte or from connecting."""

    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and has not said anything."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a request, all of it, or several."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or was hung up on."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in _IN_PART:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
