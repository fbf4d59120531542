"""Chunks from another of our programs: the client side of the data plane."""

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.chunk import ByteRange, Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.net.http1.answer import TICK, Answer, AnswerDeadline, StalledError
from bdn.net.http1.connection import split_address
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.net.tls import advice_on, failure_of_tls
from bdn.transfer.chunk_readers import PartialChunk, WrongLengthError
from bdn.wire.http_fields import MANIFEST_HEADER, SUSPECT_HEADER, chunk_path, format_range, parse_content_range
from bdn.wire.shapes import error_from

_REDIRECT_LIMIT: Final = 2  # the mirror may send us to a signed URL of its store
_WORDS_LIMIT: Final = 64 * 1024  # of a redirect or an error


@dataclass(frozen=True)
class HttpChunkReader:
    """A ``ChunkReader`` over HTTP. ``bearer`` is the grant that names a manifest with the chunks that will be asked for.

    ``manifest`` is for a peer that owns the chunks: it shall obtain what it does not hold. ``is_suspect`` tells that the chunks
    came with wrong content before: who is asked shall look before it sends. ``deadline`` is of one request; without it, the
    timeout of the connections is all there is.
    """

    connections: ConnectionPool
    base_url: str
    bearer: str | None = field(default=None, repr=False)
    manifest: Digest | None = None
    deadline: AnswerDeadline | None = None
    is_suspect: bool = False

    def read_into(self, chunk: PartialChunk) -> None:
        """Bring what is missing; content is *not* verified here."""
        if chunk.done and not chunk.missing:
            return
        place = urlsplit(self.base_url).netloc
        try:
            self._read(chunk)
        except NETWORK_ERRORS as error:  # its message may hold a signed address
            said = "; ".join(filter(None, (reason_of(error), advice_on(failure_of_tls(error)))))
            raise StoreUnavailableError(f"{place}: {said}") from None
        except StoreUnavailableError as error:
            raise type(error)(f"{place}: {error.reason}") from None

    def _read(self, chunk: PartialChunk) -> None:
        start, size = chunk.done, len(chunk.buffer)
        url = urljoin(self.base_url, chunk_path(chunk.digest))
        headers = self._headers(start, size)
        for _ in range(_REDIRECT_LIMIT + 1):
            with self.connections.get(url, headers, size - start, self.deadline) as answer:
                if answer.status not in (302, 307):
                    _check(answer, chunk.digest, start, size)
                    _receive(answer, chunk, self.deadline)
                    if chunk.missing:
                        raise StoreUnavailableError(f"chunk {chunk.digest} ended after {chunk.done} of {size} bytes")
                    return
                answer.read(_WORDS_LIMIT)
                target = urljoin(url, answer.headers.get("location") or "")
                there, here = split_address(target)[0], split_address(url)[0]
                if (here[0], there[0]) == ("https", "http"):
                    raise StoreUnavailableError("it redirects to plain HTTP")
                if there != here:
                    headers = {name: value for name, value in headers.items() if name == "Range"}
                url = target
        raise StoreUnavailableError("too many redirects")

    def _headers(self, start: int, size: int) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}
        if self.manifest is not None:
            headers[MANIFEST_HEADER] = str(self.manifest)
        if self.is_suspect:
            headers[SUSPECT_HEADER] = "1"
        if start:
            headers["Range"] = format_range(ByteRange(start, size))
        return headers


def _check(answer: Answer, digest: Digest, start: int, size: int) -> None:
    """Whether the body is what was asked for, by its head. Raises what is wrong instead."""
    if answer.status == 404:
        answer.read(_WORDS_LIMIT)
        raise NotFoundError(f"chunk {digest}")
    if answer.status != (206 if start else 200):
        raise error_from(answer.status, answer.read(_WORDS_LIMIT))
    if start and parse_content_range(answer.headers.get("content-range")) != (ByteRange(start, size), size):
        raise StoreUnavailableError(f"chunk {digest} came with another range than was asked for")
    if answer.length != size - start:
        raise WrongLengthError(f"chunk {digest} came with {answer.length} bytes instead of {size - start}")


def _receive(answer: Answer, chunk: PartialChunk, deadline: AnswerDeadline | None) -> None:
    """The body, as far as it comes."""
    rest = chunk.buffer[chunk.done :]
    if deadline is None:
        answer.fill(rest, on_bytes=chunk.received)
        return
    told = 0

    def goes_on() -> bool:
        nonlocal told
        count, told = answer.received - told, answer.received
        deadline.receiving(count)
        return True

    goes_on()
    while True:
        try:
            answer.fill(rest[answer.received :], stall=TICK, is_wanted=goes_on, on_bytes=chunk.received)
        except StalledError:
            continue  # a tick without bytes, which the deadline has heard of
        return
