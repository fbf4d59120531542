"""Buckets of Google Cloud Storage, and of emulators with its JSON API: listings and addresses, with our errors.

Requests go through ``gcsfs``, one attempt each. Only the credentials that are passed in count, not the machine's login.
"""

import asyncio
import json
import re
import ssl
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Self
from urllib.parse import quote

import aiohttp

# From the core, because the package's own GCSFileSystem queries a gRPC service about every bucket, past proxies and
# emulators.
from gcsfs.core import GCSFileSystem

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Checksum, ChecksumKind, Location, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.net.unreachable import unreachable
from bdn.sources.bucket_source import BucketObject, BucketPage, BucketSource, NotAListingError
from bdn.sources.gcs.tokens import AccessToken, tokens_of
from bdn.sources.guarded_connector import guarded_connector, proxy_for
from bdn.sources.refreshing import Refreshing
from bdn.sources.sign_in import SourceContext
from bdn.wire.http_fields import parse_retry_after

_FIELDS: Final = "items(name,generation,size,crc32c,md5Hash),nextPageToken"
# gcsfs's request (returns status, headers, request info, content) without two of its layers: one makes six attempts
# with sleeps that ignore Retry-After, the other logs the headers that hold the token.
_ONE_ATTEMPT: Final = GCSFileSystem._request.__wrapped__  # noqa: SLF001
_PATIENCE: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)  # seconds


@dataclass(eq=False)
class RefusedError(Exception):
    """An answer other than 200. Not an error of aiohttp or gcsfs: theirs drop the reason and ``Retry-After``."""

    status: int
    reason: str  # Google's reason code, such as "rateLimitExceeded", or ""
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, status: int, body: bytes, headers: Mapping[str, str]) -> Self:
        """Parse an error document of the JSON API. Any other body gives an empty reason."""
        try:
            reason = json.loads(body)["error"]["errors"][0]["reason"]
        except (ValueError, LookupError, TypeError, RecursionError):
            reason = ""
        # The reason goes into messages, and a server that is not Google's may send anything.
        return cls(status, reason if isinstance(reason, str) and _WORD.fullmatch(reason) else "", headers)


_WORD: Final = re.compile(r"[A-Za-z]{1,60}")
# The errors after aiohttp's and OSError (timeouts, resets) are what an answer that is not Google's raises when it is
# parsed.
SDK_ERRORS: Final = (
    RefusedError,
    aiohttp.ClientError,
    OSError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_SLOW_DOWN: Final = ("quotaExceeded", "rateLimitExceeded", "userRateLimitExceeded")  # also sent with status 403

_NO_PROJECT: Final = "userProjectMissing"
_ACCOUNTS: Final = ("accountDisabled", "UserProjectAccountProblem", "userProjectAccountProblem")


class GcsSource(BucketSource):
    """Lists the live generation of every object. Name and generation name the same bytes for ever."""

    is_size_in_identity: ClassVar[bool] = False

    def __init__(
        self, uri: BucketUri, context: SourceContext, tokens: Refreshing[AccessToken] | None, files: GCSFileSystem
    ) -> None:
        self._endpoint = context.settings.gcs_endpoint_url
        super().__init__(uri, context.reader, "gs", self._endpoint)
        self._asker = context.asker
        self._tokens = tokens
        self._files = files

    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        async def read() -> BucketPage:
            headers, _ = await self._signed()
            asked = {"prefix": prefix or None, "maxResults": limit, "pageToken": token, "fields": _FIELDS}
            try:
                answer = await _ONE_ATTEMPT(self._files, "GET", "b/{}/o", self._uri.bucket, headers=headers, **asked)
                return _page(json.loads(answer[-1]))
            except SDK_ERRORS as error:
                raise translate(error, str(self._uri), anonymous=self._tokens is None) from error

        # Renew the token before acquiring a slot: token requests have their own retries, which inside would multiply
        # ours.
        await self._signed()
        return await self._asker.ask(self._endpoint, read)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of this generation. Sends no request unless the token must be renewed.

        Other bytes would be a 404, so the ``ETag`` of answers need not be compared. GCS decompresses objects that were
        stored with ``Content-Encoding: gzip``, and ignores ranges of them, unless the client accepts gzip. Listed size
        and checksum describe the stored bytes, so the request asks for the stored bytes.
        """
        headers, expires_at = await self._signed()
        bucket, name = quote(self._uri.bucket, safe=""), quote(file.handle, safe="")
        return Location(
            f"{self._endpoint}/download/storage/v1/b/{bucket}/o/{name}?alt=media&generation={file.version}",
            (*headers.items(), ("Accept-Encoding", "gzip")),
            expires_at=expires_at,
            may_be_encoded=True,
            refused=partial(read_refusal, str(self._uri), file.path),
        )

    async def _signed(self) -> tuple[dict[str, str], float | None]:
        if self._tokens is None:
            return {}, None
        token = await self._tokens.get()
        return {"Authorization": f"Bearer {token.value}"}, token.expires_at


@asynccontextmanager
async def open_gcs(uri: BucketUri, context: SourceContext) -> AsyncIterator[GcsSource]:
    """Open the source without a request; its connections are closed at the end."""
    settings = context.settings
    # In a thread: parsing a private key takes milliseconds, and reading a file depends on its disk.
    tokens = await asyncio.to_thread(tokens_of, uri, context)
    trusted: ssl.SSLContext | bool = True
    if settings.ca_bundle:
        trusted = await asyncio.to_thread(ssl.create_default_context, cafile=settings.ca_bundle)
    async with aiohttp.ClientSession(
        connector=guarded_connector(settings.egress, ssl=trusted),
        raise_for_status=_refuse,
        proxy=proxy_for(settings.gcs_endpoint_url),
    ) as session:
        files = GCSFileSystem(
            token="anon",  # noqa: S106 - our headers sign; gcsfs's credentials refresh on the event loop, blocking
            endpoint_url=settings.gcs_endpoint_url,
            requests_timeout=_PATIENCE,
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        files._session = session  # noqa: SLF001 - otherwise gcsfs opens a session that is never closed
        yield GcsSource(uri, context, tokens, files)


async def _refuse(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RefusedError.of(response.status, await response.read(), response.headers)


def _page(document: Mapping[str, Any]) -> BucketPage:
    following = document.get("nextPageToken")
    if following is not None and not isinstance(following, str):
        raise NotAListingError("a listing is truncated, and has no valid page token")
    return BucketPage(tuple(_object(entry) for entry in document.get("items", ())), following or None)


def _object(entry: Mapping[str, str]) -> BucketObject:
    name, generation, size = str(entry["name"]), _whole(entry["generation"]), _whole(entry["size"])
    if not name or name != entry["name"]:
        raise ValueError
    return BucketObject(name, size, str(generation), _checksum(entry))


def _whole(text: str) -> int:
    """GCS writes numbers as strings of digits."""
    if not re.fullmatch(r"[0-9]{1,30}", text):
        raise ValueError
    return int(text)


def _checksum(entry: Mapping[str, str]) -> Checksum | None:
    """The CRC32C where there is one: Google computes it for every object, an MD5 not for composite ones.

    A CRC32C is computed at memory speed, chunk by chunk in any order; MD5 is ten times slower and needs the bytes in
    order. Both guard against accidents only; TLS guards against malice.
    """
    for kind, name, size in ((ChecksumKind.CRC32C, "crc32c", 4), (ChecksumKind.MD5, "md5Hash", 16)):
        if stated := entry.get(name):
            value = b64decode(stated, validate=True)
            if len(value) != size:
                raise ValueError
            return Checksum(kind, value.hex())
    return None


def read_refusal(source: str, path: str, status: int, body: bytes) -> BdnError | None:
    """Why no token can read an object, from the answer to a GET.

    None: another token may read it, or the status explains the failure.
    """
    error = RefusedError.of(status, body, {})
    reason = error.reason
    if reason in _SLOW_DOWN:
        return UpstreamRateLimitedError(source)
    if reason.lower().startswith("cloudkms"):
        remedy = "Enable the key, and grant roles/cloudkms.cryptoKeyEncrypterDecrypter on it to the bucket's Cloud Storage service agent"
        return AuthRequiredError(source, f"{path}: {status} {reason} for the key of Cloud KMS that encrypts it", remedy)
    if reason == "resourceIsEncryptedWithCustomerEncryptionKey":
        remedy = "Copy the object to one that is encrypted with a key of the service, and mirror the copy"
        return AuthRequiredError(source, f"{path}: it is encrypted with a customer-supplied key (CSEK)", remedy)
    if reason in _ACCOUNTS:
        remedy = "The owner of the project has to fix its billing account at Google Cloud"
        return AuthRequiredError(source, f"{path}: {status} {reason}", remedy)
    return _refused(error, source, anonymous=False) if reason == _NO_PROJECT else None


def translate(error: Exception, source: str, *, anonymous: bool) -> BdnError:
    """Map one of ``SDK_ERRORS`` to our error, without the client's own text: it may contain addresses and tokens."""
    match error:
        case RefusedError():
            return _refused(error, source, anonymous=anonymous)
        case aiohttp.ClientError() | OSError():
            where = f" at {error.host}" if isinstance(error, aiohttp.ClientConnectorError) else ""
            return unreachable(source, f"GCS{where} did not answer ({type(error).__name__})", error)
        case NotAListingError():
            return UpstreamUnavailableError(source, str(error))
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like GCS's ({type(error).__name__})")


def _refused(error: RefusedError, source: str, *, anonymous: bool) -> BdnError:
    status = error.status
    answer = f"{status} {error.reason}".rstrip()
    wait = parse_retry_after(error.headers)
    if status == 429 or error.reason in _SLOW_DOWN:
        return UpstreamRateLimitedError(source, wait)
    if status in (401, 403):
        return AuthRequiredError(source, f"{answer}: {_denial(status, anonymous=anonymous)}")
    if status == 404:
        return SourceNotFoundError(source, "the bucket does not exist")
    if status == 400:
        reason = "GCS cannot have a bucket or prefix of this name"
        if error.reason == _NO_PROJECT:
            reason = "the bucket is requester pays, and BDN has no project to bill"
        return InvalidSourceError(source, f"{source}: {reason} ({answer})")
    return UpstreamUnavailableError(source, f"GCS answered {answer}", wait)


def _denial(status: int, *, anonymous: bool) -> str:
    if anonymous:
        return "anonymous reading is not allowed"
    if status == 401:
        return "the access token is not valid"
    return (
        "these credentials may not list it; they need storage.objects.list and storage.objects.get, "
        "as in the role Storage Object Viewer"
    )
