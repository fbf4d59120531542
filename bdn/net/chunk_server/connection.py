"""One client of the data plane, as a state machine over a socket that never blocks.

    reading a head → (waiting for a Future) → sending → reading the next head … → draining

``advance`` goes on until it would block and says what to wait for. Whoever calls it again may do so for any reason (an event,
a moment that has come, or by mistake): each state looks for itself at what has happened.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.net.chunk_server.answer import Answer, answer_chunk, answer_document, answer_error, answer_refusal
from bdn.net.chunk_server.body import ChunkBody
from bdn.net.chunk_server.head import RequestHead, RequestRefusedError
from bdn.net.chunk_server.reading import RECEIVE_BYTES, RequestReader
from bdn.net.chunk_server.sending import EndedError, Pace, Sending, StalledReaderError, Wait, has_hung_up
from bdn.net.chunk_server.served_chunks import ChunkRequest, ChunkShelf, DocumentRequest, DocumentShelf, OpenChunk
from bdn.net.chunk_server.timeouts import Patience
from bdn.wire.paths import MANIFEST_HEADER, SUSPECT_HEADER, parse_chunk_path, parse_document_path

logger = logging.getLogger(__name__)

_DRAIN_BYTES: Final = 1024 * 1024
_DRAIN_SECONDS: Final = 2.0
_MANIFEST: Final = MANIFEST_HEADER.lower()
_SUSPECT: Final = SUSPECT_HEADER.lower()
_SIGN_SECONDS: Final = 1.0
_ON_ITS_WAY: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: what is in the socket's buffer is given up


class ShelfFailedError(Exception):
    """A shelf raised what no shelf may: a bug, or a disk that fails."""


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections of a server share."""

    shelf: ChunkShelf
    on_sent: Callable[[int], None]
    patience: Patience
    pace: Pace | None
    documents: DocumentShelf | None = None
    clock: Callable[[], float] = time.monotonic


class ChunkConnection:
    """Owns its socket and, while it sends, the chunk's file. One thread at a time calls it."""

    __slots__ = (
        "_asked", "_drained", "_head", "_next_sign", "_reader", "_sending", "_service", "_socket", "_step", "_until",
        "awaited", "is_watched",
    )  # fmt: skip

    def __init__(self, connection: socket.socket, service: Service) -> None:
        self.is_watched = False  # these two are kept here for whoever watches the socket
        self.awaited: Future[object] | None = None
        self._socket = connection
        self._service = service
        self._reader = RequestReader(service.patience, service.clock)
        self._drained = 0
        self._next_sign = 0.0
        self._head: RequestHead
        self._asked: ChunkRequest
        self._sending: Sending | None = None
        self._step: Callable[[], Wait | None] = self._read
        self._until = 0.0

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def first_wait(self) -> Wait:
        """What to wait for before the first ``advance``."""
        return self._reader.wait

    def advance(self) -> Wait | None:
        """Go on until it would block. None: the connection has ended, and is closed."""
        try:
            while (wait := self._step()) is None:
                pass
        except StalledReaderError as error:
            logger.debug("a chunk client is cut off: %s", error)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except EndedError as end:
            logger.debug("a chunk client's connection ends: %s", end)
        except (ConnectionError, TimeoutError) as error:
            logger.debug("a chunk client went away: %s", error)
        except Exception:
            logger.exception("a chunk client's connection failed")
        else:
            return wait
        self.close()
        return None

    def shut_down(self) -> None:
        """End it from another thread: whoever advances it finds out at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the client was faster

    def close(self) -> None:
        """Close the socket and the file."""
        self._end_sending()
        self._socket.close()

    def _read(self) -> Wait | None:
        try:
            head = self._reader.read(self._socket)
            if isinstance(head, Wait):
                return head
            self._head = head
            asked = _request(head)
        except RequestRefusedError as error:
            self._send(answer_refusal(error.status, InvalidRequestError(str(error))))
        except NotFoundError as error:
            self._send(answer_error(self._head, error))
        else:
            self._answer(asked)
        return None

    def _answer(self, asked: ChunkRequest | DocumentRequest) -> None:
        if isinstance(asked, DocumentRequest):
            self._attempt(partial(self._send_document, asked))
            return
        self._asked = asked
        self._until = self._service.clock() + self._service.patience.obtaining_seconds
        self._attempt(self._ask)

    # --- asking the shelf, which may block ---

    def _attempt(self, step: Callable[[], None]) -> None:
        """Take a step that ends with an answer or a Future. What else the shelf or the disk raises is no client's doing."""
        try:
            step()
        except BdnError as error:
            self._send(answer_error(self._head, error))
        except Exception as error:
            raise ShelfFailedError(self._head.target) from error

    def _ask(self) -> None:
        self._service.shelf.authorize(self._asked)
        self._open()

    def _open(self) -> None:
        found = self._service.shelf.open_chunk(self._asked)
        if isinstance(found, OpenChunk):
            self._send_chunk(found)
        else:
            self._step, self._next_sign = partial(self._await, found), 0.0

    def _await(self, future: Future[object]) -> Wait | None:
        """The chunk is on its way. A client that closes its side now has gone: that is nginx's rule, too."""
        if future.done() or self._service.clock() >= self._until:
            self._attempt(partial(self._ask_again, future))
            return None
        if has_hung_up(self._socket, select.POLLRDHUP):
            raise EndedError("the client did not wait for the chunk")
        return Wait(select.EPOLLRDHUP, min(self._until, self._show_life()), future)

    def _show_life(self) -> float:
        """Tell a peer now and then that its chunk is on its way, not forgotten. When to do so next.

        An interim answer is nothing new to HTTP/1.1 (RFC 9110, section 15.2), but who names no manifest is no peer of ours and
        may not expect one, and to HTTP/1.0 none may be sent.
        """
        if self._asked.manifest is None or self._head.is_http_1_0:
            return self._until
        now = self._service.clock()
        if now >= self._next_sign:
            self._next_sign = now + _SIGN_SECONDS
            with suppress(BlockingIOError):  # then it has more to read already than it reads
                if self._socket.send(_ON_ITS_WAY) != len(_ON_ITS_WAY):
                    raise EndedError("the client does not read")
        return self._next_sign

    def _ask_again(self, future: Future[object]) -> None:
        if not future.done():
            seconds = self._service.patience.obtaining_seconds
            raise StoreUnavailableError(f"{self._asked.digest} did not come within {seconds:g} s")
        if future.cancelled():
            raise StoreUnavailableError(f"{self._asked.digest} was given up")
        future.result()
        self._open()

    # --- sending ---

    def _send_chunk(self, chunk: OpenChunk) -> None:
        self._send_file(chunk, lambda: answer_chunk(self._head, self._asked.digest, chunk.size))

    def _send_document(self, request: DocumentRequest) -> None:
        if self._service.documents is None:
            raise NotFoundError(f"path {self._head.target[:100]!a}")
        document = self._service.documents.open_document(request)
        self._send_file(document, lambda: answer_document(self._head, document.size))

    def _send_file(self, chunk: OpenChunk, make: Callable[[], Answer]) -> None:
        try:
            answer = make()
            body = ChunkBody(chunk, answer.start, answer.size) if answer.size else None
        except BaseException:
            chunk.file.close()
            raise
        if body is None:
            chunk.file.close()
        self._send(answer, body)

    def _send(self, answer: Answer, body: ChunkBody | None = None) -> None:
        service = self._service
        self._sending = Sending(answer, body, service.patience.slowest, service.pace, service.clock)
        self._step = partial(self._go_on_sending, self._sending)

    def _go_on_sending(self, sending: Sending) -> Wait | None:
        wait = sending.advance(self._socket)
        if wait is not None:
            return wait
        self._end_sending()
        if sending.is_last:
            self._socket.shutdown(socket.SHUT_WR)
            self._until, self._step = self._service.clock() + _DRAIN_SECONDS, self._drain
            return None
        self._step = self._read
        # Without a request at hand others may go first: a client that never pauses must not keep a worker for itself.
        return None if self._reader.turn() else self._reader.wait

    def _end_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.close()
            if sending.sent:
                self._service.on_sent(sending.sent)

    def _drain(self) -> Wait | None:
        """Read what the client still says, for a while: a socket closed with unread bytes in it takes back its last answer."""
        try:
            piece = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            if self._service.clock() >= self._until:
                raise EndedError("the last answer is through") from None
            return Wait(select.EPOLLIN, self._until)
        self._drained += len(piece)
        if not piece or self._drained > _DRAIN_BYTES:
            raise EndedError("the last answer is through")
        return None


def _request(head: RequestHead) -> ChunkRequest | DocumentRequest:
    if head.method not in ("GET", "HEAD"):
        raise RequestRefusedError(501, f"the method {head.method[:20]} is not supported")
    manifest = head.headers.get(_MANIFEST)
    if (document := parse_document_path(head.target)) is not None:
        return DocumentRequest(*document, head.bearer)
    digest = parse_chunk_path(head.target)
    if digest is None:
        raise NotFoundError(f"path {head.target[:100]!a}")
    try:
        named = None if manifest is None else Digest.parse(manifest)
        return ChunkRequest(digest, head.bearer, named, is_suspect=_SUSPECT in head.headers)
    except ValueError:
        raise RequestRefusedError(400, f"{MANIFEST_HEADER} is not the name of a manifest") from None
