"""What the head of an answer says about the bytes that were asked for: right, or an error. Never data when in doubt."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.chunk import ByteRange
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.ports import Headers, Location
from bdn.net.http1.answer import Answer
from bdn.wire.http_fields import parse_content_range, parse_retry_after


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Which bytes of which file; ``source`` and ``path`` are for messages."""

    source: str
    path: str
    range: ByteRange
    size: int  # of the whole file

    @property
    def is_whole(self) -> bool:
        """Whether the range is the file."""
        return self.range.size == self.size


@dataclass(eq=False)
class LocationRefusedError(AuthRequiredError):
    """401 or 403 for a location: signed URLs expire, so a fresh location may work; if it does not, access is refused."""


@dataclass(eq=False)
class UpstreamUntrustedError(UpstreamUnavailableError):
    """Nobody vouches for whoever answers there. Asking again changes nothing until a certificate or an address is mended."""

    transient = False


def check_head(answer: Answer, location: Location, request: RangeRequest, wanted: ByteRange | None) -> None:
    """Accept an answer that holds the bytes ``wanted``, or, when no range was asked for (None), the whole file.

    Raises:
        BdnError: the answer is something else; which one says who is to blame.
    """
    headers = answer.headers
    if answer.status == 200 and wanted is None:
        _check_encoding(answer, location, request, request.size)
        if answer.length != request.size:
            stated = "of unknown size" if answer.length is None else answer.length
            raise SourceChangedError(request.source, request.path, f"its size was {request.size} and is {stated}")
    elif answer.status == 206:
        _check_range(answer, location, request, wanted or request.range)
    else:
        raise _error_for(answer.status, headers, request)
    if location.etag is not None and plain_etag(headers) != location.etag.removeprefix("W/").strip('"'):
        raise SourceChangedError(request.source, request.path, "its ETag is another one")


def plain_etag(headers: Headers) -> str:
    """The ETag without its quotes; nothing where there is none."""
    return (headers.get("ETag") or "").removeprefix("W/").strip('"')


def _check_range(answer: Answer, location: Location, request: RangeRequest, wanted: ByteRange) -> None:
    stated = parse_content_range(answer.headers.get("Content-Range"))
    if stated is not None and stated[1] != request.size:  # first: of a file that shrank, the range may be cut
        raise SourceChangedError(request.source, request.path, f"its size was {request.size} and is {stated[1]}")
    if stated is None or stated[0] != wanted:
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer holds other bytes than asked for")
    _check_encoding(answer, location, request, wanted.size)
    if answer.length not in (None, wanted.size):
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is encoded or has the wrong length")


def _check_encoding(answer: Answer, location: Location, request: RangeRequest, size: int) -> None:
    """An encoding that the server applied changes the bytes, and their number; one that the file was stored with does not."""
    encoding = answer.headers.get("Content-Encoding")
    if encoding in (None, "", "identity") or (location.may_be_encoded and answer.length == size):
        return
    raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is encoded or has the wrong length")


def _error_for(status: int, headers: Headers, request: RangeRequest) -> BdnError:
    source, path = request.source, request.path
    if status in (400, 401, 403):  # S3 tells with a 400 that the keys of an address have expired (ExpiredToken)
        return LocationRefusedError(source, f"{path}: status {status}")
    if status in (404, 410):
        return SourceChangedError(source, path, "it is gone")
    if status in (412, 416):
        return SourceChangedError(source, path, f"status {status}")
    if status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status == 200:
        return UpstreamUnavailableError(source, f"{path}: the whole file came where a range was asked for")
    return UpstreamUnavailableError(source, f"{path}: status {status}", parse_retry_after(headers))
