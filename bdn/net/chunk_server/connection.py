"""One client of the data plane, as a state machine over a non-blocking socket.

    (handshake →) reading a head → (waiting for a Future →) sending → reading the next head … → draining
                                 → (waiting for the body, for a buffer →) receiving → sending …

``advance`` runs until it would block, or one request is answered, and returns what to wait for. Spurious calls are
harmless: each state checks for itself what has happened.
"""

import logging
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.errors import (
    BdnError,
    ChecksumMismatchError,
    ForeignRequestError,
    InvalidRequestError,
    NotFoundError,
    StoreUnavailableError,
)
from bdn.core.pace.retry import StallPolicy
from bdn.net.chunk_server.encrypted import EncryptedSocket, encrypted
from bdn.net.chunk_server.messages import (
    RequestHead,
    Response,
    after_body,
    answer_chunk,
    answer_error,
    answer_taken,
    awaits_continue,
    body_size,
    find_head,
    parse_head,
)
from bdn.net.chunk_server.receiving import BufferTurn, ReceiveBuffers, Receiving
from bdn.net.chunk_server.sending import NEXT_TURN, EndedError, Pace, Sending, StalledReaderError, Wait, has_happened
from bdn.net.chunk_server.served_chunks import (
    ChunkRequest,
    OpenChunk,
    PushedChunk,
    ReceivedChunks,
    ServedChunks,
)
from bdn.net.tls import HANDSHAKE, SPEAKS_PLAIN_HTTP, Certificate, refusal_of_plain_http
from bdn.wire.http_fields import (
    MANIFEST_HEADER,
    SUSPECT_HEADER,
    HeadRefusedError,
    check_local,
    parse_chunk_path,
    parse_push_path,
)

logger = logging.getLogger(__name__)
_DRAIN_BYTES: Final = CHUNK_SIZE + 1024 * 1024  # the body of a refused PUT
_DRAIN_SECONDS: Final = 2.0
_MANIFEST: Final = MANIFEST_HEADER.lower()
_SUSPECT: Final = SUSPECT_HEADER.lower()
_PROCESSING_SECONDS: Final = 1.0
_PROCESSING: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: discard the socket's send buffer
_RECEIVE_BYTES: Final = 64 * 1024
_EMPTY_LINES: Final = 16
_SLOWEST: Final = StallPolicy(window_seconds=30.0)
_SLOWEST_SENDER: Final = StallPolicy(least_bytes=1024 * 1024, window_seconds=30.0)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """``idle_seconds`` between requests, ``head_seconds`` per head or handshake, ``obtaining_seconds`` per chunk.

    A reader slower than ``slowest`` has stalled. A sender slower than ``slowest_sender`` has stalled, too: it occupies
    one of few buffers. The windows are longer than for bodies that we read, because progress is visible in steps only:
    a client's kernel with a full buffer of 6 MB acknowledges nothing until a sixteenth of it is free.
    """

    idle_seconds: float = 60.0
    head_seconds: float = 10.0
    obtaining_seconds: float = 120.0
    slowest: StallPolicy = _SLOWEST
    slowest_sender: StallPolicy = _SLOWEST_SENDER


@dataclass(slots=True)
class RequestReader:
    """Reads request heads from a non-blocking socket. Buffers at most one head and the result of one ``recv``."""

    timeouts: Timeouts
    _received: bytearray = field(default_factory=bytearray, init=False)
    _searched: int = field(default=0, init=False)  # bytes known to contain no end of a head
    _empty_lines: int = field(default=0, init=False)
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.timeouts.idle_seconds

    @property
    def wait(self) -> Wait:
        """What to wait for while the head is incomplete."""
        return Wait(select.EPOLLIN, self._until)

    def begin_next(self) -> bool:
        """Start the timeout of the next request. Returns whether part of it was received already."""
        has_begun = bool(self._received)
        self._until = time.monotonic() + (self.timeouts.head_seconds if has_begun else self.timeouts.idle_seconds)
        return has_begun

    def read(self, connection: socket.socket) -> RequestHead | Wait:
        """Read the next head, or return what to wait for.

        Raises ``HeadRefusedError`` for a malformed head; ``EndedError`` when none will arrive.
        """
        while (end := self._find_head()) < 0:
            try:
                piece = connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                if time.monotonic() >= self._until:
                    raise EndedError("the client sends nothing, or too slowly") from None
                return self.wait
            if not piece:
                raise EndedError("the client closed the connection")
            if not self._received:
                self._until = time.monotonic() + self.timeouts.head_seconds
            self._received += piece
            # TLS to a plain port: no head will arrive, and the client waits for a response.
            if self._received[0] == HANDSHAKE:
                raise HeadRefusedError(400, SPEAKS_PLAIN_HTTP)
        content = bytes(self._received[:end])
        del self._received[:end]
        self._searched = self._empty_lines = 0
        return parse_head(content)

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes after the last head are buffered."""
        return bool(self._received)

    def take_into(self, buffer: memoryview) -> int:
        """Move body bytes that were received with the head into ``buffer``."""
        count = min(len(buffer), len(self._received))
        with memoryview(self._received) as received:
            buffer[:count] = received[:count]
        del self._received[:count]
        return count

    def keep(self, piece: bytes) -> None:
        """Buffer bytes received with the end of a body: the beginning of the next head."""
        self._received += piece

    def _find_head(self) -> int:
        # RFC 9112, section 2.2: some clients send an extra line end after a body.
        while self._received.startswith(b"\r\n"):
            del self._received[:2]
            self._empty_lines += 1
            if self._empty_lines > _EMPTY_LINES:  # a client that sends only empty lines would occupy its worker
                raise HeadRefusedError(400, "too many empty lines before the request")
        end = find_head(self._received, self._searched)
        self._searched = len(self._received)
        return end


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by all connections of a server."""

    chunks: ServedChunks
    on_sent: Callable[[int], None]
    timeouts: Timeouts
    pace: Pace | None
    is_local: bool = False
    certificate: Certificate | None = None
    received: ReceivedChunks | None = None
    buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)
    on_received: Callable[[int], None] = lambda _: None
    on_known: "Callable[[ChunkConnection, str], None]" = lambda _, __: None


@dataclass(eq=False, slots=True)
class ChunkConnection:
    """Owns its socket and, while sending, the chunk's file, or while receiving, a buffer.

    One thread at a time calls it.
    """

    _socket: socket.socket
    _service: Service
    address: str = ""
    is_watched: bool = field(default=False, init=False)  # the poller owns these two
    awaited: Future[object] | None = field(default=None, init=False)
    organisation: str | None = field(default=None, init=False)  # of the last authorised request
    _reader: RequestReader = field(init=False)
    _step: Callable[[], Wait | None] = field(init=False)
    _head: RequestHead = field(init=False)
    _request: ChunkRequest | PushedChunk = field(init=False)
    _buffer: BufferTurn | None = field(default=None, init=False)
    _receiving: Receiving | None = field(default=None, init=False)
    _sending: Sending | None = field(default=None, init=False)
    _until: float = field(default=0.0, init=False)
    _next_processing: float = field(default=0.0, init=False)
    _drained: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._reader = RequestReader(self._service.timeouts)
        if self._service.certificate is None:
            self._step = self._read
        else:
            self._until = time.monotonic() + self._service.timeouts.head_seconds
            self._step = partial(self._shake_hands, self._service.certificate)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def first_wait(self) -> Wait:
        """What to wait for before the first ``advance``."""
        return self._reader.wait if self._service.certificate is None else Wait(select.EPOLLIN, self._until)

    @property
    def owner(self) -> str:
        """The owner of this connection's turns at the workers: its organisation, or its address while unknown."""
        return f"at {self.address}" if self.organisation is None else self.organisation

    @property
    def is_idle(self) -> bool:
        """Whether it may be closed in favour of another connection: no authorised request is in progress.

        Call only while the connection waits.
        """
        return self.organisation is None or self._step == self._read

    def advance(self) -> Wait | None:
        """Run until it would block, its owner changes, or one request is answered.

        Returns None when the connection has ended and is closed.
        """
        owner = self.owner
        try:
            while (wait := self._step()) is None:
                if self.owner != owner:
                    return NEXT_TURN
        except StalledReaderError as error:
            logger.debug("connection of chunk client %s reset: %s", self.address, error)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except EndedError as end:
            logger.debug("connection of chunk client %s ended: %s", self.address, end)
        except (ConnectionError, TimeoutError, ssl.SSLError) as error:
            logger.debug("chunk client %s disconnected: %s", self.address, error)
        except Exception:
            logger.exception("connection of chunk client %s failed", self.address)
        else:
            return wait
        self.close()
        return None

    def shut_down(self) -> None:
        """End it from another thread; the next ``advance`` closes it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the client closed first

    def close(self) -> None:
        """Close socket and file, and release the buffer, or the wait for one."""
        self._end_sending()
        self._end_receiving()
        self._socket.close()

    def _shake_hands(self, certificate: Certificate) -> Wait | None:
        """Advance the TLS handshake: each step occupies a worker for at most a millisecond; waits are in the poller."""
        events = select.EPOLLIN
        try:
            if not isinstance(self._socket, EncryptedSocket):
                begun = self._socket.recv(1, socket.MSG_PEEK)
                if begun and begun[0] != HANDSHAKE:
                    self._send(Response(refusal_of_plain_http(), is_last=True))
                    return None
                if not begun:
                    raise EndedError("the client closed the connection")
                self._socket = encrypted(self._socket, certificate.context())
            self._socket.do_handshake()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            events = select.EPOLLOUT
        except OSError as error:  # such as ENOTCONN: the client has gone; or it does not trust the certificate
            raise EndedError(f"TLS handshake failed: {error}") from None
        else:
            self._reader.begin_next()
            self._step = self._read
            return None
        if time.monotonic() >= self._until:
            raise EndedError("the client did not finish the TLS handshake in time")
        return Wait(events, self._until)

    def _read(self) -> Wait | None:
        try:
            head = self._reader.read(self._socket)
            if isinstance(head, Wait):
                return head
            self._head = head
            if self._service.is_local:
                check_local(head.headers.get("host"), head.headers.get("origin"))
            self._request = _parse_request(head, takes_chunks=self._service.received is not None)
        except HeadRefusedError as error:
            self._send(answer_error(None, InvalidRequestError(str(error)), error.status))
        except (ForeignRequestError, NotFoundError) as error:
            self._send(answer_error(self._head, error))
        else:
            self._until = time.monotonic() + self._service.timeouts.obtaining_seconds
            self._attempt(self._authorize)
        return None

    # --- looking up the chunk, which may block ---

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step that ends with a response or a Future.

        Raises ``RuntimeError`` for any error but ``BdnError``: it is not the client's fault.
        """
        try:
            step()
        except BdnError as error:
            self._send(answer_error(self._head, error))
        except Exception as error:  # a bug or a failing disk, not a ConnectionError of this client
            raise RuntimeError(f"the look-up of {self._head.target} failed") from error

    def _authorize(self) -> None:
        request = self._request
        if isinstance(request, PushedChunk):
            assert self._service.received is not None  # noqa: S101 - otherwise the path was not found
            self._await_body_for(self._service.received, request)
            return
        request = replace(request, organisation=self._service.chunks.authorize(request))
        self._know(request.organisation)
        self._step = partial(self._find, request)

    def _find(self, request: ChunkRequest) -> None:
        """A separate step, so that blocking happens in the organisation's turn."""
        self._attempt(partial(self._open, request))

    def _know(self, organisation: str) -> None:
        if organisation != self.organisation:
            try:
                self._service.on_known(self, organisation)
            except StoreUnavailableError:  # the organisation is at its limit of connections
                self._head = replace(self._head, keeps_alive=False)
                raise
            self.organisation = organisation

    def _open(self, request: ChunkRequest) -> None:
        found = self._service.chunks.open_chunk(request)
        if isinstance(found, OpenChunk):
            self._send_file(found, lambda: answer_chunk(self._head, request.digest, found.size))
        else:
            self._step, self._next_processing = partial(self._await, partial(self._open, request), found), 0.0

    def _await(self, then: Callable[[], None], future: Future[Any]) -> Wait | None:
        """Wait for the chunk, then call ``then``. A client that closes its sending side counts as gone, as in nginx."""
        if future.done() or time.monotonic() >= self._until:
            self._attempt(partial(self._resume, then, future))
            return None
        if has_happened(self._socket, select.POLLRDHUP):
            raise EndedError("the client did not wait for the chunk")
        return Wait(select.EPOLLRDHUP, min(self._until, self._send_processing()), future)

    def _send_processing(self) -> float:
        """Send ``102 Processing`` to a waiting peer at intervals (ADR 0012). Returns when to do so next.

        A client without ``BDN-Manifest`` is not a peer and may not expect it, and HTTP/1.0 has no interim responses
        (RFC 9110, 15.2).
        """
        if _MANIFEST not in self._head.headers or self._head.is_http_1_0:
            return self._until
        now = time.monotonic()
        if now >= self._next_processing:
            self._next_processing = now + _PROCESSING_SECONDS
            self._send_interim(_PROCESSING)
        return self._next_processing

    def _send_interim(self, answer: bytes) -> None:
        """Skipped when the socket is full: the client has enough to read."""
        if not has_happened(self._socket, select.POLLOUT):
            return
        try:
            is_sent = self._socket.send(answer) == len(answer)
        except BlockingIOError:
            is_sent = False
        if not is_sent:  # a partial interim response would corrupt the final one
            raise EndedError("the client does not read")

    def _resume(self, then: Callable[[], None], future: Future[Any]) -> None:
        if not future.done():
            seconds = self._service.timeouts.obtaining_seconds
            raise StoreUnavailableError(f"{self._head.target} was not obtained within {seconds:g} s")
        if future.cancelled():
            raise StoreUnavailableError(f"obtaining {self._head.target} was canceled")
        future.result()
        then()

    # --- receiving ---

    def _await_body_for(self, received: ReceivedChunks, request: PushedChunk) -> None:
        """Authorise a sender before its body is read, without using memory. It gets a buffer once it sends."""
        request = replace(request, organisation=received.authorize(request))
        self._know(request.organisation)
        self._until = time.monotonic() + self._service.timeouts.slowest_sender.window_seconds
        self._step = partial(self._await_body, received, request)
        if not self._reader.holds_bytes and awaits_continue(self._head):
            self._send_interim(_CONTINUE)

    def _await_body(self, received: ReceivedChunks, request: PushedChunk) -> Wait | None:
        if not self._reader.holds_bytes:
            try:
                piece = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                if time.monotonic() >= self._until:
                    raise EndedError("the sender sends nothing") from None
                return Wait(select.EPOLLIN, self._until)
            if not piece:
                raise EndedError("the sender disconnected before it sent its chunk")
            self._reader.keep(piece)
        self._until = time.monotonic() + self._service.timeouts.obtaining_seconds
        self._buffer = self._service.buffers.request(request.organisation)
        self._step = partial(self._await_buffer, received, request, self._buffer)
        return None

    def _await_buffer(self, received: ReceivedChunks, request: PushedChunk, turn: BufferTurn) -> Wait | None:
        if turn.granted.done():
            self._begin_receiving(received, request, self._service.buffers.buffer_of(turn))
        elif time.monotonic() >= self._until:
            self._end_receiving()
            self._send(answer_error(self._head, StoreUnavailableError("too many chunks are being received; try again")))
        elif has_happened(self._socket, select.POLLRDHUP):
            raise EndedError("the sender did not wait for a buffer")
        else:
            return Wait(select.EPOLLRDHUP, self._until, turn.granted)
        return None

    def _begin_receiving(self, received: ReceivedChunks, request: PushedChunk, buffer: memoryview) -> None:
        done = self._reader.take_into(buffer[: request.size])
        self._receiving = Receiving(buffer, request.size, self._service.timeouts.slowest_sender, done)
        self._step = partial(self._receive, received, request, self._receiving)

    def _receive(self, received: ReceivedChunks, request: PushedChunk, receiving: Receiving) -> Wait | None:
        wait = receiving.advance(self._socket)
        if wait is None:
            if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                # ``epoll`` does not see bytes that are decrypted already.
                self._reader.keep(self._socket.recv(_RECEIVE_BYTES))
            self._head = after_body(self._head)
            self._attempt(partial(self._take, received, request, receiving))
        return wait

    def _take(self, received: ReceivedChunks, request: PushedChunk, receiving: Receiving) -> None:
        try:
            actual = receiving.digest
            if actual == request.digest:
                received.take(request, receiving.content)
        finally:
            self._end_receiving()
        if actual == request.digest:
            self._send(answer_taken(self._head))
        else:  # the client's fault, not an upstream's
            wrong = ChecksumMismatchError("the chunk", str(request.digest), str(actual))
            self._send(answer_error(self._head, wrong, 422))

    def _end_receiving(self) -> None:
        turn, self._buffer = self._buffer, None
        if turn is not None:
            self._service.buffers.release(turn)
        receiving, self._receiving = self._receiving, None
        if receiving is not None and receiving.done:
            self._service.on_received(receiving.done)

    # --- sending ---

    def _send_file(self, chunk: OpenChunk, make: Callable[[], Response]) -> None:
        try:
            self._send(make(), chunk)
        except BaseException:
            chunk.file.close()
            raise

    def _send(self, answer: Response, chunk: OpenChunk | None = None) -> None:
        self._sending = Sending(answer, chunk, self._service.timeouts.slowest, self._service.pace)
        self._step = partial(self._go_on_sending, self._sending)

    def _go_on_sending(self, sending: Sending) -> Wait | None:
        wait = sending.advance(self._socket)
        if wait is not None:
            return wait
        self._end_sending()
        if sending.is_last:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:  # ENOTCONN
                raise EndedError("the client reset the connection") from None
            self._until, self._step = time.monotonic() + _DRAIN_SECONDS, self._drain
            return None
        self._step = self._read
        # Other connections go first: a client that never pauses, or pipelines, must not occupy a worker.
        return NEXT_TURN if self._reader.begin_next() else self._reader.wait

    def _end_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.close()
            if sending.sent:
                self._service.on_sent(sending.sent)

    def _drain(self) -> Wait | None:
        """Read for a while what the client still sends.

        Closing a socket with unread bytes resets it, and the client loses the last response.
        """
        try:
            piece = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            if time.monotonic() >= self._until:
                raise EndedError("the last response was sent") from None
            return Wait(select.EPOLLIN, self._until)
        self._drained += len(piece)
        if not piece or self._drained > _DRAIN_BYTES:
            raise EndedError("the last response was sent")
        return None


def _parse_request(head: RequestHead, *, takes_chunks: bool) -> ChunkRequest | PushedChunk:
    pushed = parse_push_path(head.target) if head.method == "PUT" else None
    if pushed is not None:
        if not takes_chunks:
            raise NotFoundError(f"path {head.target[:100]!a}")
        return PushedChunk(*pushed, body_size(head, CHUNK_SIZE), head.bearer)
    if head.method not in ("GET", "HEAD"):
        raise HeadRefusedError(501, f"the method {head.method[:20]} is not supported")
    digest = parse_chunk_path(head.target)
    if digest is None:
        raise NotFoundError(f"path {head.target[:100]!a}")
    manifest = head.headers.get(_MANIFEST)
    try:
        named = None if manifest is None else Digest.parse(manifest)
    except ValueError:
        raise HeadRefusedError(400, f"{MANIFEST_HEADER} is not the digest of a manifest (b3:<64 hex>)") from None
    return ChunkRequest(digest, head.bearer, named, is_suspect=_SUSPECT in head.headers)
