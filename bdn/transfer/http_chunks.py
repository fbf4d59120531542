"""Reads chunks over HTTP: from a mirror's or agent's data plane, and from the bucket of the mirror's store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.chunk import ByteRange, Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.source.upstream import Location
from bdn.net.http1.answer import TICK, Answer, AnswerDeadline, StalledError
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.net.tls import advice_on, failure_of_tls
from bdn.transfer.chunk_readers import PartialChunk, WrongLengthError
from bdn.wire.http_fields import MANIFEST_HEADER, SUSPECT_HEADER, chunk_path, format_range, parse_content_range
from bdn.wire.shapes import error_from

_WORDS_LIMIT: Final = 64 * 1024  # bytes of an error


@dataclass(frozen=True)
class HttpChunkReader:
    """A ``ChunkReader`` over HTTP, without verification. ``bearer`` is a grant for a manifest that contains the chunks.

    Follows no redirect: our services send none.

    ``manifest`` is for a peer that owns the chunks: the peer obtains chunks that it does not hold. ``is_suspect``: the
    chunks had wrong content before, so the server verifies them before sending. ``deadline`` is for one request;
    without it, only the timeout of the connections applies.
    """

    connections: ConnectionPool
    base_url: str
    bearer: str | None = field(default=None, repr=False)
    manifest: Digest | None = None
    deadline: AnswerDeadline | None = None
    is_suspect: bool = False

    def read_into(self, chunk: PartialChunk) -> None:
        if chunk.done and not chunk.missing:
            return
        start, size = chunk.done, len(chunk.buffer)
        url = urljoin(self.base_url, chunk_path(chunk.digest))
        with (
            _naming(urlsplit(self.base_url).netloc, is_ours=True),
            self.connections.get(url, self._headers(start, size), size - start, self.deadline) as answer,
        ):
            _check(answer, chunk.digest, start, size)
            _receive(answer, chunk, self.deadline)

    def _headers(self, start: int, size: int) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}
        if self.manifest is not None:
            headers[MANIFEST_HEADER] = str(self.manifest)
        if self.is_suspect:
            headers[SUSPECT_HEADER] = "1"
        if start:
            headers["Range"] = format_range(ByteRange(start, size))
        return headers


class AddressRefusedError(StoreUnavailableError):
    """The bucket refused a signed address: the address has expired, by the bucket's clock, or its keys have."""


class BucketBusyError(StoreUnavailableError):
    """The bucket responds, but cannot serve now: it is throttling (429, 503 SlowDown) or failing."""


@dataclass(frozen=True)
class LocatedChunkReader:
    """Reads the chunk at ``location``, unverified. Sends the location's headers, no grant, and follows no redirect.

    Raises, besides the errors of every reader: ``AddressRefusedError``, ``BucketBusyError``, and ``NotFoundError`` if
    the object does not exist. Messages contain only the host of the address.
    """

    connections: ConnectionPool
    location: Location
    deadline: AnswerDeadline | None = None

    def read_into(self, chunk: PartialChunk) -> None:
        start, size = chunk.done, len(chunk.buffer)
        headers = dict(self.location.headers)
        if start:
            headers["Range"] = format_range(ByteRange(start, size))
        with (
            _naming(_host_of(self.location.url), is_ours=False),
            self.connections.get(self.location.url, headers, size - start, self.deadline) as answer,
        ):
            if answer.status not in (404, 206 if start else 200):
                answer.read(_WORDS_LIMIT)
                raise _refusal(answer.status)
            _check(answer, chunk.digest, start, size)
            _receive(answer, chunk, self.deadline)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or "the bucket"
    except ValueError:
        return "the bucket"


def _refusal(status: int) -> StoreUnavailableError:
    if status in (400, 401, 403):  # S3 reports expired keys of an address with a 400 (ExpiredToken)
        return AddressRefusedError(f"status {status}")
    if status == 429 or status >= 500:
        return BucketBusyError(f"status {status}")
    return StoreUnavailableError(f"unexpected answer {status}")


@contextmanager
def _naming(place: str, *, is_ours: bool) -> Iterator[None]:
    """Errors name their origin, with advice on BDN's own TLS; no more: network errors may contain a signed address."""
    try:
        yield
    except NETWORK_ERRORS as error:
        advice = advice_on(failure_of_tls(error)) if is_ours else None
        raise StoreUnavailableError(f"{place}: {'; '.join(filter(None, (reason_of(error), advice)))}") from None
    except StoreUnavailableError as error:
        raise type(error)(f"{place}: {error.reason}") from None


def _check(answer: Answer, digest: Digest, start: int, size: int) -> None:
    """Check the head against the request. Raises the matching error."""
    if answer.status == 404:
        answer.read(_WORDS_LIMIT)
        raise NotFoundError(f"chunk {digest}")
    if answer.status != (206 if start else 200):
        raise error_from(answer.status, answer.read(_WORDS_LIMIT))
    if start and parse_content_range(answer.headers.get("content-range")) != (ByteRange(start, size), size):
        raise StoreUnavailableError(f"chunk {digest} came with another range than requested")
    if answer.length != size - start:
        raise WrongLengthError(f"chunk {digest} came with {answer.length} bytes instead of {size - start}")


def _receive(answer: Answer, chunk: PartialChunk, deadline: AnswerDeadline | None) -> None:
    """Read the whole body. Raises ``StoreUnavailableError`` after a part of it."""
    rest = chunk.buffer[chunk.done :]
    if deadline is None:
        answer.fill(rest, on_bytes=chunk.received)
    else:
        _receive_within(answer, rest, chunk, deadline)
    if chunk.missing:
        raise StoreUnavailableError(f"chunk {chunk.digest} ended after {chunk.done} of {len(chunk.buffer)} bytes")


def _receive_within(answer: Answer, rest: memoryview, chunk: PartialChunk, deadline: AnswerDeadline) -> None:
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
            continue  # a tick without bytes, which ``goes_on`` has reported to the deadline
        return
