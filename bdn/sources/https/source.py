"""One file at an https address, of any server that states its length and a version of it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

from bdn.core.errors import InvalidSourceError
from bdn.core.source.upstream import Identity, Location, Resolution, UpstreamFile, listed_path
from bdn.core.source.uri import HttpsUri
from bdn.core.store import scope_of
from bdn.net.http1.answer import Answer
from bdn.sources.requests import SourceRequests, open_requests, refusal
from bdn.sources.sign_in import Secret, SourceContext, http_authorization
from bdn.wire.http_fields import parse_content_range

_SENT_AS_WRITTEN: Final = "/%!$&'()*+,;=:@~"  # RFC 3986, section 3.3; an escape stays what it is
_FIRST_BYTE: Final = {"Range": "bytes=0-0"}
_EMPTY: Final = "bytes */0"  # Content-Range of a 416 for an empty file (RFC 9110, section 14.4)


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a server says of the file; None where it does not."""

    size: int | None
    version: str | None  # an ETag, or the Last-Modified of a server without
    encoding: str

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.version is not None and not self.encoding


class HttpsSource:
    """Listing costs one request, two where HEAD is refused. Resolving and locating cost none: redirects are followed anew.

    ``authorization`` None reads anonymously.
    """

    def __init__(
        self, uri: HttpsUri, context: SourceContext, requests: SourceRequests, authorization: str | None
    ) -> None:
        self._source = str(uri)
        self._url = f"https://{uri.place}/{quote(uri.path, safe=_SENT_AS_WRITTEN)}"
        self._name = unquote(uri.path.rpartition("/")[2])
        self._scope = scope_of(context.reader)
        self._requests = requests
        self._headers = {"Authorization": authorization} if authorization else {}

    async def resolve(self) -> Resolution:
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """Yield the file, under the last segment of its path.

        Raises ``InvalidSourceError``: the server does not state what a verified copy needs.
        """
        if not self._name.startswith(tuple(within)):
            return
        found = await self._ask("HEAD", {})
        if not found.is_complete:  # HEAD may be refused, or answered by another part of the server
            found = await self._ask("GET", _FIRST_BYTE)
        size, version = self._checked(found)
        identity = Identity.of(self._scope, "https", self._url, version, str(size))
        yield UpstreamFile(listed_path(self._name), size, identity, self._url, version)

    async def locate(self, file: UpstreamFile) -> Location:
        is_etag, is_weak = file.version.endswith('"'), file.version.startswith("W/")
        pin = () if is_weak else (("If-Match" if is_etag else "If-Unmodified-Since", file.version),)
        return Location(
            self._url,
            (*self._headers.items(), *pin),
            etag=file.version if is_etag else None,
            modified=None if is_etag else file.version,
        )

    async def _ask(self, method: str, headers: Mapping[str, str]) -> _Stated:
        read = partial(self._read, method)
        return await self._requests.ask(method, self._url, {**self._headers, **headers}, read)

    def _read(self, method: str, answer: Answer) -> _Stated:
        status, headers = answer.status, answer.headers
        etag = headers.get("etag")
        if etag and not etag.endswith('"'):
            etag = f'W/"{etag}"'  # some servers omit the quotes; If-Match needs them, so it is compared only
        version = etag or headers.get("last-modified") or None
        encoding = headers.get("content-encoding", "").lower().replace("identity", "")
        if status == 416 and headers.get("content-range") == _EMPTY:
            return _Stated(0, version, encoding)
        if status == 206:
            part = parse_content_range(headers.get("content-range"))
            return _Stated(part[1] if part else None, version, encoding)
        if status == 200:
            length = headers.get("content-length") if method == "HEAD" else answer.length
            return _Stated(None if length is None else int(length), version, encoding)
        if method == "HEAD" and (status == 501 or (400 <= status < 500 and status != 429)):
            return _Stated(None, None, "")
        raise refusal(
            self._source,
            f"the server answered {status}",
            status,
            headers,
            "the credentials may not read it" if self._headers else "anonymous reading is not allowed",
        )

    def _checked(self, found: _Stated) -> tuple[int, str]:
        if found.encoding:
            reason = (
                f"the server sends it with Content-Encoding {found.encoding[:40]!a}, although BDN requests it without"
            )
        elif found.size is None:
            reason = "the server does not state its length, without which a part could pass for the whole"
        elif found.version is None:
            reason = "the server states neither ETag nor Last-Modified, without which a change during the copy would pass unseen"
        else:
            return found.size, found.version
        raise InvalidSourceError(
            self._source, f"{self._source}: {reason}; change the server, or put the file into a bucket and name that"
        )


@asynccontextmanager
async def open_https(uri: HttpsUri, context: SourceContext) -> AsyncIterator[HttpsSource]:
    """Open the source without a request; its connections are closed at the end."""
    authorization = http_authorization(context.sign_in) if isinstance(context.sign_in, Secret) else None
    async with open_requests(str(uri), context) as requests:
        yield HttpsSource(uri, context, requests, authorization)
