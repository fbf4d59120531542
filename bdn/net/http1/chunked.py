"""Bodies in the chunked transfer coding (RFC 9112, section 7.1): pieces of stated sizes, then an empty one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from bdn.net.http1.head import HEAD_LIMIT, ProtocolError

_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*+)?\r\n")
_SIZE_LINE_LIMIT: Final = 4096  # its extensions mean nothing to us


class ChunkedBody:
    """Takes a body out of its pieces. ``receive_into`` and ``receive_until`` are those of the connection."""

    def __init__(self, receive_into: Callable[[memoryview], int], receive_until: Callable[[bytes, int], bytes]) -> None:
        self._receive_into = receive_into
        self._receive_until = receive_until
        self._left = 0  # of the current piece
        self._is_first = True
        self._has_ended = False

    def receive_into(self, buffer: memoryview) -> int:
        """Bytes of the body into the buffer; 0 when it has ended.

        Raises:
            ConnectionError: the connection ended before the body did.
            ProtocolError: the pieces are not as they must be.
        """
        if self._has_ended or not (self._left or self._begin_piece()):
            return 0
        count = self._receive_into(buffer[: self._left])
        if not count:
            raise ConnectionResetError("the connection ended inside the answer")
        self._left -= count
        return count

    def _begin_piece(self) -> bool:
        """Read up to the content of the next piece; False when that was the last one."""
        if not self._is_first:
            self._receive_until(b"\r\n", 2)  # nothing but the end of the piece before
        self._is_first = False
        line = self._receive_until(b"\r\n", _SIZE_LINE_LIMIT)
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise ProtocolError("a piece of the answer has no size")
        self._left = int(found[1], 16)
        if not self._left:
            room = HEAD_LIMIT
            while (trailer := self._receive_until(b"\r\n", room)) != b"\r\n":
                room -= len(trailer)
            self._has_ended = True
        return not self._has_ended
