"""Ranges of one upstream file over HTTP, into a buffer: every way an answer can be wrong is an error, never data."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.chunk import ByteRange
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceChangedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.ports import Location
from bdn.transfer.connections import NETWORK_ERRORS, ConnectionPool, origin_of, read_exactly, reason_of
from bdn.wire.ranges import format_range, parse_content_range
from bdn.wire.retry_after import parse_retry_after

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_REDIRECT_LIMIT: Final = 5
_REDIRECT_BODY_LIMIT: Final = 64 * 1024  # read to keep the connection; a longer one is not worth it
_CREDENTIAL_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-amz-security-token"})


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Which bytes of which file; ``source`` and ``path`` are for messages."""

    source: str
    path: str
    range: ByteRange
    size: int  # of the whole file


@dataclass(eq=False)
class LocationRefusedError(AuthRequiredError):
    """401 or 403 for a location: signed URLs expire, so a fresh location may work; if it does not, access is refused."""


class RangedReader:
    """Reads ranges; shared by byte threads."""

    def __init__(self, connections: ConnectionPool) -> None:
        self._connections = connections

    def read_into(self, location: Location, request: RangeRequest, buffer: memoryview) -> None:
        """Fill ``buffer``, which is exactly as long as the range.

        Raises:
            LocationRefusedError: locate the file again, once.
            SourceChangedError: the file is not the one that was listed.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later.
        """
        url, headers = location.url, dict(location.headers)
        headers["Range"] = format_range(request.range)
        try:
            for _ in range(_REDIRECT_LIMIT + 1):
                with self._connections.get(url, headers) as response:
                    if response.status not in _REDIRECTS:
                        _check_head(response, location, request)
                        self._read_body(response, request, buffer)
                        return
                    response.read(_REDIRECT_BODY_LIMIT)
                    url, headers = _follow(url, headers, response)
        except NETWORK_ERRORS as error:
            reason = f"{request.path}: {reason_of(error)}"
            raise UpstreamUnavailableError(request.source, reason) from None  # its message may hold a signed address
        raise UpstreamUnavailableError(request.source, f"{request.path}: more than {_REDIRECT_LIMIT} redirects")

    @staticmethod
    def _read_body(response: http.client.HTTPResponse, request: RangeRequest, buffer: memoryview) -> None:
        done = read_exactly(response, buffer)
        if done != len(buffer):
            raise UpstreamUnavailableError(
                request.source, f"{request.path}: the answer ended after {done} of {len(buffer)} bytes"
            )
        if response.read(1):  # at the end, this marks the connection as reusable
            raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is longer than the range")


def _follow(url: str, headers: dict[str, str], response: http.client.HTTPResponse) -> tuple[str, dict[str, str]]:
    """Where a redirect leads, without our credentials when that is another origin."""
    target = urljoin(url, response.headers.get("Location") or "")
    if origin_of(urlsplit(target)) != origin_of(urlsplit(url)):
        headers = {name: value for name, value in headers.items() if name.lower() not in _CREDENTIAL_HEADERS}
    return target, headers


def _check_head(response: http.client.HTTPResponse, location: Location, request: RangeRequest) -> None:
    status = response.status
    if status != 206:
        raise _error_for(status, response, request)
    stated = parse_content_range(response.headers.get("Content-Range"))
    if stated is not None and stated[1] != request.size:  # first: of a file that shrank, the range may be cut
        raise SourceChangedError(request.source, request.path, f"its size was {request.size} and is {stated[1]}")
    if stated is None or stated[0] != request.range:
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer holds other bytes than asked for")
    length = response.headers.get("Content-Length")
    if response.headers.get("Content-Encoding", "identity") != "identity" or length not in (
        None,
        str(request.range.size),
    ):
        raise UpstreamUnavailableError(request.source, f"{request.path}: the answer is encoded or has the wrong length")
    etag = response.headers.get("ETag")
    if location.etag is not None and _plain(etag) != _plain(location.etag):
        raise SourceChangedError(request.source, request.path, "its ETag is another one")


def _error_for(status: int, response: http.client.HTTPResponse, request: RangeRequest) -> BdnError:
    if status in (401, 403):
        return LocationRefusedError(request.source, f"{request.path}: status {status}")
    if status in (404, 410):
        return SourceChangedError(request.source, request.path, "it is gone")
    if status in (412, 416):
        return SourceChangedError(request.source, request.path, f"status {status}")
    if status == 429:
        return UpstreamRateLimitedError(request.source, parse_retry_after(response.headers))
    if status == 200:
        return UpstreamUnavailableError(
            request.source, f"{request.path}: the whole file came where a range was asked for"
        )
    return UpstreamUnavailableError(request.source, f"{request.path}: status {status}")


def _plain(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')
