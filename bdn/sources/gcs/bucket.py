"""One bucket of GCS, or of what speaks its JSON API: its listing and addresses of its objects, with our errors.

The real ``gcsfs`` asks, with one attempt per request; only what is passed in counts, not the machine's own login.
"""

import asyncio
import json
import re
import ssl
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypedDict
from urllib.parse import quote

import aiohttp

# From the core, because the package's own GCSFileSystem asks a gRPC service about every bucket, through no proxy or emulator.
from gcsfs.core import GCSFileSystem

from bdn.core.egress import EgressPolicy
from bdn.core.errors import UpstreamUnavailableError
from bdn.core.source.upstream import ASK_ONCE, Asker, Checksum, ChecksumKind, Location
from bdn.core.source.uri import BucketUri
from bdn.sources.bucket_tree import PAGE
from bdn.sources.gcs.errors import SDK_ERRORS, RefusedError, translate
from bdn.sources.gcs.tokens import TokenProvider
from bdn.sources.guarded_connector import guarded_connector, proxy_for

_FIELDS: Final = "items(name,generation,size,crc32c,md5Hash),nextPageToken"
# gcsfs's request (status, headers, what was asked, content), inside of two of its layers that do harm here: six attempts with
# sleeps that know of no Retry-After, and a log of the headers that hold the token.
_ONE_ATTEMPT: Final = GCSFileSystem._request.__wrapped__  # noqa: SLF001
_PATIENCE: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)  # seconds


class _ListedObject(TypedDict, total=False):
    name: str
    generation: str
    size: str
    crc32c: str
    md5Hash: str


class _Page(TypedDict, total=False):
    items: list[_ListedObject]
    nextPageToken: object


@dataclass(frozen=True, slots=True)
class GcsEndpoint:
    """Which GCS, and as whom. ``tokens`` None is anonymous."""

    url: str
    tokens: TokenProvider | None
    egress: EgressPolicy
    ca_bundle: str | None = None


@dataclass(frozen=True, slots=True)
class GcsObject:
    """One listed object. Its name and its generation name these bytes for ever."""

    name: str
    generation: str
    size: int
    checksum: Checksum | None


class GcsBucket:
    """The bucket of a source. ``asker`` sends every request, which is made once here: retries are its own."""

    def __init__(self, uri: BucketUri, endpoint: GcsEndpoint, files: GCSFileSystem, asker: Asker) -> None:
        self._uri = uri
        self._endpoint = endpoint
        self._files = files
        self._asker = asker

    async def objects(self, prefix: str, *, page: int = PAGE) -> AsyncIterator[GcsObject]:
        """The live objects whose names begin with ``prefix``, in the order of their names; one request per ``page``."""
        token: str | None = None
        while True:
            # Renewed before a slot is taken: its failures are its own, and inside, each attempt of ours would be many of its.
            await self._signed()
            ask = partial(self._page, prefix, page, token)
            objects, token = await self._asker.ask(self._endpoint.url, ask)
            for entry in objects:
                yield entry
            if not token:
                return

    async def link(self, name: str, generation: str) -> Location:
        """Where this generation is read, made without a request unless the token has to be renewed.

        GCS unpacks objects that were stored with ``Content-Encoding: gzip``, and ignores ranges of them, unless the client
        takes gzip. Listed size and checksum are those of the stored bytes, so the stored bytes are what is asked for.
        """
        headers, expires_at = await self._signed()
        return Location(
            f"{self._endpoint.url}/download/storage/v1/b/{quote(self._uri.bucket, safe='')}/o/{quote(name, safe='')}"
            f"?alt=media&generation={generation}",
            (*headers.items(), ("Accept-Encoding", "gzip")),
            expires_at=expires_at,
            may_be_encoded=True,
        )

    async def _page(self, prefix: str, size: int, token: str | None) -> tuple[tuple[GcsObject, ...], str | None]:
        headers, _ = await self._signed()
        asked = {"prefix": prefix or None, "maxResults": size, "pageToken": token, "fields": _FIELDS}
        try:
            answer = await _ONE_ATTEMPT(self._files, "GET", "b/{}/o", self._uri.bucket, headers=headers, **asked)
            page: _Page = json.loads(answer[-1])
            objects = tuple(_object(entry) for entry in page.get("items", ()))
            following = page.get("nextPageToken")
        except SDK_ERRORS as error:
            raise translate(error, str(self._uri), anonymous=self._endpoint.tokens is None) from error
        if following is not None and (not isinstance(following, str) or following == token):
            # Asking for the same page again would never end.
            raise UpstreamUnavailableError(str(self._uri), "a listing goes on but does not tell where")
        return objects, following

    async def _signed(self) -> tuple[dict[str, str], float | None]:
        if self._endpoint.tokens is None:
            return {}, None
        token = await self._endpoint.tokens.token()
        return {"Authorization": f"Bearer {token.value}"}, token.expires_at


@asynccontextmanager
async def connect(uri: BucketUri, endpoint: GcsEndpoint, *, asker: Asker = ASK_ONCE) -> AsyncIterator[GcsBucket]:
    """The bucket, without a request yet; its connections are closed at the end."""
    trusted: ssl.SSLContext | bool = True
    if endpoint.ca_bundle:
        trusted = await asyncio.to_thread(ssl.create_default_context, cafile=endpoint.ca_bundle)
    async with aiohttp.ClientSession(
        connector=guarded_connector(endpoint.egress, ssl=trusted),
        raise_for_status=_refuse,
        proxy=proxy_for(endpoint.url),
    ) as session:
        files = GCSFileSystem(
            token="anon",  # noqa: S106 - our headers sign; its own credentials would block the event loop to refresh
            endpoint_url=endpoint.url,
            requests_timeout=_PATIENCE,
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        files._session = session  # noqa: SLF001 - else it makes one that nobody closes
        yield GcsBucket(uri, endpoint, files, asker)


async def _refuse(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RefusedError.of(response.status, await response.read(), response.headers)


def _object(entry: _ListedObject) -> GcsObject:
    name, generation, size = str(entry["name"]), _whole(entry["generation"]), _whole(entry["size"])
    if not name or name != entry["name"]:
        msg = "an object that cannot be one"
        raise ValueError(msg)
    return GcsObject(name, str(generation), size, _checksum(entry))


def _whole(text: str) -> int:
    """GCS writes numbers as texts of digits."""
    if not re.fullmatch(r"[0-9]{1,30}", text):
        msg = "not a whole number"
        raise ValueError(msg)
    return int(text)


def _checksum(entry: _ListedObject) -> Checksum | None:
    """CRC32C where there is one: Google has it for every object, an MD5 not for composite ones.

    It is also read at memory speed and chunk by chunk in any order, where MD5 is a tenth as fast and wants the bytes in
    order. Both guard against accidents only; what guards against malice is TLS.
    """
    if crc32c := entry.get("crc32c"):
        return Checksum(ChecksumKind.CRC32C, _hex(crc32c, 4))
    if md5 := entry.get("md5Hash"):
        return Checksum(ChecksumKind.MD5, _hex(md5, 16))
    return None


def _hex(text: str, size: int) -> str:
    """The listing's base64 of big-endian bytes, as our hexadecimal digits."""
    value = b64decode(text, validate=True)
    if len(value) != size:
        msg = "a checksum of the wrong length"
        raise ValueError(msg)
    return value.hex()
