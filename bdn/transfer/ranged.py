"""Reads ranges of one upstream file over HTTP into a buffer: every way an answer can be wrong is an error, never data.

When a connection breaks or stalls inside a body, the bytes received count, and the remainder of the range is requested
on a new connection. Both parts are of one version: every request carries the location's pin, and both answers the same
ETag.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn
from urllib.parse import urlsplit

from bdn.core.chunk import ByteRange
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import Persistence, ResumePolicy, StallPolicy
from bdn.core.source.upstream import Checksum, Headers, Location
from bdn.net.http1.answer import Answer, Clock, StalledError
from bdn.net.http1.connection import ProtocolError
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.net.unreachable import unreachable
from bdn.wire.http_fields import format_range, parse_content_range, parse_retry_after


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A range of a file; ``source`` and ``path`` are for messages."""

    source: str
    path: str
    range: ByteRange
    size: int  # of the whole file

    @property
    def is_whole(self) -> bool:
        return self.range.size == self.size


class LocationRefusedError(AuthRequiredError):
    """401 or 403 for a location: signed URLs expire, so a fresh location may work; otherwise access is refused."""


class RangesIgnoredError(UpstreamUnavailableError):
    """The server repeatedly sent a whole file of several chunks for a range: the file can only be read in order."""

    transient = False


_REFUSAL_LIMIT: Final = 16 * 1024  # bytes of an error document
_IGNORED_RANGES_LIMIT: Final = 3  # requests for one range; a single answer may come from one faulty cache of many


def check_head(answer: Answer, location: Location, request: RangeRequest, wanted: ByteRange | None) -> None:
    """Accept an answer that contains the bytes ``wanted`` or, if no range was requested (None), the whole file.

    A server may ignore a range (RFC 9110, section 14.2): a 200 is accepted if the range is the whole file. Without a
    length it is read to its end.

    Raises ``BdnError``: the answer is something else; the type says which side is at fault.
    """
    headers = answer.headers
    if answer.status == 200 and (wanted is None or wanted.size == request.size):
        _check_encoding(answer, location, request, request.size)
        if answer.length not in (None, request.size):
            raise other_size(request, f"is {answer.length}")
    elif answer.status == 206:
        _check_range(answer, location, request, wanted or request.range)
    else:
        raise _refusal_told(answer, location) or _error_for(answer.status, headers, request)
    if location.etag is not None and plain_etag(headers) != location.etag.removeprefix("W/").strip('"'):
        raise SourceChangedError(request.source, request.path, "its ETag changed")
    if location.modified is not None and headers.get("last-modified") != location.modified:
        raise SourceChangedError(request.source, request.path, "its Last-Modified changed")


def other_size(request: RangeRequest, found: str) -> SourceChangedError:
    """``found`` describes the size found now, as a clause."""
    return SourceChangedError(request.source, request.path, f"its size was {request.size} and {found}")


def plain_etag(headers: Headers) -> str:
    """The ETag without quotes; empty if there is none."""
    return (headers.get("etag") or "").removeprefix("W/").strip('"')


def _check_range(answer: Answer, location: Location, request: RangeRequest, wanted: ByteRange) -> None:
    stated = parse_content_range(answer.headers.get("content-range"))
    if stated is not None and stated[1] != request.size:  # first: the range of a shrunken file may be cut
        raise other_size(request, f"is {stated[1]}")
    if stated is None or stated[0] != wanted:
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer holds another range than requested")
    _check_encoding(answer, location, request, wanted.size)
    if answer.length not in (None, wanted.size):
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is encoded or has the wrong length")


def _check_encoding(answer: Answer, location: Location, request: RangeRequest, size: int) -> None:
    """Encodings applied by the server change the bytes and their number; encodings of the stored file do not.

    ``aws-chunked`` frames an upload, never the stored bytes; some servers store it and state it with every GET.
    """
    encodings = {name.strip().lower() for name in (answer.headers.get("content-encoding") or "").split(",")}
    if encodings <= {"", "identity", "aws-chunked"} or (location.may_be_encoded and answer.length == size):
        return
    raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is encoded or has the wrong length")


def _error_for(status: int, headers: Headers, request: RangeRequest) -> BdnError:
    source, path = request.source, request.path
    if status in (400, 401, 403):  # S3 reports expired keys of an address with a 400 (ExpiredToken)
        return LocationRefusedError(source, f"{path}: status {status}")
    if status in (404, 410, 412, 416):
        return SourceChangedError(source, path, "it no longer exists" if status in (404, 410) else f"status {status}")
    if status == 451:
        return SourceNotFoundError(source, f"{path}: status 451, the service withholds it for legal reasons")
    if status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status == 200:
        return RangesIgnoredError(
            source,
            f"{path}: the server ignores Range and sent the whole file ({request.size} bytes). A part of it can only be read "
            "from an endpoint or through a proxy that supports ranges",
        )
    return UpstreamUnavailableError(source, f"{path}: status {status}", parse_retry_after(headers))


def _refusal_told(answer: Answer, location: Location) -> BdnError | None:
    """Parse a refusal's body, as much as arrives before a stall. None if it contains no known error."""
    if location.refused is None or not 400 <= answer.status < 500:
        return None
    content = bytearray(_REFUSAL_LIMIT)
    with suppress(*NETWORK_ERRORS), memoryview(content) as buffer:
        answer.fill(buffer, StallPolicy())
    return location.refused(answer.status, bytes(content[: answer.received]))


@dataclass(frozen=True)
class RangedReader:
    connections: ConnectionPool
    resume: ResumePolicy = field(default_factory=ResumePolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    clock: Clock = time.monotonic

    def read_into(
        self,
        location: Location,
        request: RangeRequest,
        buffer: memoryview,
        goes_on: Callable[[int], bool] | None = None,
    ) -> Checksum | None:
        """Fill ``buffer``, which has exactly the size of the range.

        ``goes_on`` is called with the number of bytes received, whenever some arrive and once per window of the stall
        policy. It returns whether more is still wanted.

        Returns the checksum that the answer states for the whole file, if the location can parse it and the range is
        the whole file. The file is then requested without a Range, because some upstreams state it only for whole
        objects.

        Raises:
            LocationRefusedError: locate the file again, once.
            SourceChangedError: the file is not the one that was listed.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later; the buffer's content is then undefined.
            UpstreamUntrustedError, RangesIgnoredError: permanent.
            EgressRefusedError: the address, or a redirect's, may not be contacted.
            CanceledError: ``goes_on`` returned False during the body; a slow body could otherwise occupy its thread for
                minutes.
        """
        return RangeRead(self, location, request, buffer, goes_on or (lambda _: True)).run()


@dataclass(slots=True)
class RangeRead:
    """One range being read: ``done`` bytes of the buffer are right."""

    reader: RangedReader
    location: Location
    request: RangeRequest
    buffer: memoryview
    goes_on: Callable[[int], bool]
    done: int = 0
    first: Headers | None = None  # of the answer that the buffer begins with
    asked: str = ""  # the last requested address; it may be signed
    ignored: int = 0  # answers with the whole file where a range was requested

    def run(self) -> Checksum | None:
        """Request until the buffer is full, or until an immediate request for the remainder is pointless."""
        persistence = None
        while True:
            before = self.done
            try:
                self._ask()
            except RangesIgnoredError:
                self.ignored += 1
                if self.ignored >= _IGNORED_RANGES_LIMIT:
                    raise
                if self.request.is_whole:  # a server without ranges cannot resume the file, but can send it again
                    self.done, self.first = 0, None
            except NETWORK_ERRORS as error:
                persistence = persistence or Persistence(self.reader.resume, self.reader.stall)
                gained, stalled = self.done - before, isinstance(error, StalledError)
                # A server that frames a body wrongly may have sent anything; and a full buffer leaves nothing to
                # request.
                is_sound = not isinstance(error, ProtocolError) and self.done < len(self.buffer)
                if not (is_sound and persistence.goes_on(gained, stalled=stalled)):
                    self.fail(error)
            else:
                break
        if self.location.stated is None or not self.request.is_whole or self.first is None:
            return None
        return self.location.stated(self.first)

    def _ask(self) -> None:
        """One request for the missing bytes, with its redirects."""
        headers, wanted = dict(self.location.headers), self._missing()
        if wanted is not None:
            headers["Range"] = format_range(wanted)
        with self.answered(headers, len(self.buffer) - self.done) as answer:
            check_head(answer, self.location, self.request, wanted)
            self._check_same(answer.headers)
            self._read_body(answer)

    @contextmanager
    def answered(self, headers: Mapping[str, str], expected: int) -> Iterator[Answer]:
        """The answer at the end of the redirects, with a body of about ``expected`` bytes."""
        with self.reader.connections.following("GET", self.location.url, headers, expected, self._note) as answer:
            yield answer

    def _note(self, url: str) -> None:
        self.asked = url

    def _missing(self) -> ByteRange | None:
        """The range to request; None requests the whole file without a Range."""
        if not self.done:
            is_plain = self.location.stated is not None and self.request.is_whole
            return None if is_plain else self.request.range
        return ByteRange(self.request.range.start + self.done, self.request.range.stop)

    def _check_same(self, headers: Headers) -> None:
        """Answers with two ETags may be two versions, even if none was listed. Then neither is used."""
        if self.first is None:
            self.first = headers
        elif plain_etag(self.first) != plain_etag(headers):
            raise self.unavailable("two answers have different ETags")

    def _read_body(self, answer: Answer) -> None:
        rest = self.buffer[self.done :] if self.done else self.buffer
        try:
            answer.fill(rest, self.reader.stall, self.reader.clock, lambda: self.goes_on(self.done + answer.received))
        finally:
            self.done += answer.received
            self.goes_on(self.done)
        # A chunked body states its end, so the file ends here.
        is_whole = answer.status == 200 and "transfer-encoding" in answer.headers
        if is_whole and (self.done != len(self.buffer) or not answer.has_ended()):
            raise other_size(self.request, "the answer has another size")
        if self.done != len(self.buffer):
            raise ConnectionResetError(f"the answer ended after {self.done} of {len(self.buffer)} bytes")
        if not answer.has_ended():
            raise self.unavailable("the answer is longer than the range")

    def unavailable(self, reason: str) -> UpstreamUnavailableError:
        """``reason`` says what is wrong with the file or its answer."""
        return UpstreamUnavailableError(self.request.source, f"{self.request.path}: {reason}")

    def fail(self, error: Exception) -> NoReturn:
        """Raise our error without the cause, whose message may contain a signed address."""
        reason = f"{self.request.path}: {self._host}{reason_of(error)}"
        raise unreachable(self.request.source, reason, error) from None

    @property
    def _host(self) -> str:
        """The host at fault: a redirect may have led to another host than the source's."""
        try:
            return f"{urlsplit(self.asked).hostname}: "
        except ValueError:
            return ""
