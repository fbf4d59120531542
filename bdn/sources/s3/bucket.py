"""One bucket of S3, or of what speaks S3: pages of its listing, heads and addresses of its objects, with our errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from botocore.exceptions import ClientError

from bdn.core.errors import SourceChangedError
from bdn.core.source.upstream import ASK_ONCE, Asker, Checksum, ChecksumKind, Headers, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.bucket_tree import PAGE
from bdn.sources.s3.client import LISTING, S3Client, S3Endpoint, s3_client
from bdn.sources.s3.errors import SDK_ERRORS, NotAListingError, region_told, translate, translate_head
from bdn.sources.s3.signature import GetSigner, plain_address

ADDRESS_SECONDS: Final = 3600
_NO_VERSION: Final = "null"  # what S3 calls the version of an object that was written while versioning was off

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class S3Head:
    """What only a HEAD tells about an object. ``version_id`` is None where the bucket does not keep versions."""

    version_id: str | None
    checksum: Checksum | None


@dataclass(frozen=True, slots=True)
class S3Address:
    """Where an object can be read until ``expires_at``, which is None for ever."""

    url: str
    expires_at: float | None


class S3Bucket:
    """The bucket of a source. A bucket of another region than it was opened in is followed there, once.

    Args:
        uri: the bucket, and the name of the source for messages.
        endpoint: where it is, and as whom.
        open_client: a client for a region, which stays open.
        asker: sends every request.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        uri: BucketUri,
        endpoint: S3Endpoint,
        open_client: Callable[[str], Awaitable[S3Client]],
        *,
        asker: Asker = ASK_ONCE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._uri = uri
        self._asker = asker
        self._credentials = endpoint.credentials
        self._home = self._region = endpoint.region
        self._open_client = open_client
        self._clock = clock
        self._client: S3Client | None = None
        self._opening = asyncio.Lock()
        self._base: str | None = None
        self._signer: GetSigner | None = None

    async def objects(self, prefix: str, *, page: int = PAGE) -> AsyncIterator[S3Object]:
        """The objects whose keys begin with ``prefix``, in the order of their keys; one request per ``page``."""
        token = None
        while True:
            listed = await self.page(prefix, limit=page, token=token)
            for entry in listed.objects:
                yield entry
            if listed.following is None:
                return
            token = listed.following

    async def page(self, prefix: str, *, limit: int = PAGE, token: str | None = None) -> S3Page:
        """Up to ``limit`` objects whose keys begin with ``prefix``, after those of the page that gave the token."""
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Prefix": prefix, "MaxKeys": limit}
        request["EncodingType"] = "url"  # XML cannot hold every character that a key can
        if token:
            request["ContinuationToken"] = token
        base = await self._base_address()
        await self._have_keys()
        return await self._asker.ask(base, lambda: self._page(request))

    async def head(self, file: UpstreamFile, version_id: str | None = None) -> S3Head:
        """What the object of a listed file is now, for one request; of an older version, whether that may be read.

        Raises:
            SourceChangedError: it is not the listed one any more.
        """
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Key": file.handle, "IfMatch": file.version}
        request["ChecksumMode"] = "ENABLED"
        if version_id is not None:
            request["VersionId"] = version_id
        base = await self._base_address()
        await self._have_keys()
        return await self._asker.ask(base, lambda: self._head(file, request))

    async def address(self, key: str, version_id: str | None = None) -> S3Address:
        """Where the object can be read; made without a request, in some microseconds.

        It is signed for the region in which the bucket answered before.
        """
        base = self._base or await self._base_address()
        if self._credentials is None:
            return S3Address(plain_address(base, key, version_id), None)
        credentials, now = await self._credentials.get(), int(self._clock())
        signer = self._signer
        if signer is None or signer.signed_at != now or signer.credentials is not credentials or signer.base != base:
            signer = self._signer = GetSigner.of(base, self._region, credentials, now, ADDRESS_SECONDS)
        return S3Address(signer.address(key, version_id), signer.expires_at)

    async def _have_keys(self) -> None:
        """Renew keys that are about to end before a slot is taken, which the token service on the same host may need.

        Its failures are its own then: inside, each attempt of ours would be many of its.
        """
        if self._credentials is not None:
            await self._credentials.get()

    async def _page(self, request: dict[str, object]) -> S3Page:
        try:
            listing = await self._ask(lambda client: client.list_objects_v2(**request))
            return await asyncio.to_thread(read_page, listing[LISTING])
        except SDK_ERRORS as error:
            raise translate(error, str(self._uri), anonymous=self._credentials is None) from error

    async def _head(self, file: UpstreamFile, request: dict[str, object]) -> S3Head:
        source = str(self._uri)
        try:
            head = await self._ask(lambda client: client.head_object(**request))
            etag, size, version_id = head["ETag"], head["ContentLength"], head.get("VersionId")
            checksum = stated_checksum(head["ResponseMetadata"]["HTTPHeaders"])
        except SDK_ERRORS as error:
            raise translate_head(error, source, file.path, anonymous=self._credentials is None) from error
        if etag.strip('"') != file.version.strip('"'):  # where If-Match is not understood
            raise SourceChangedError(source, file.path, "its ETag is another one")
        if size != file.size:
            raise SourceChangedError(source, file.path, f"its size was {file.size} and is {size}")
        return S3Head(None if version_id == _NO_VERSION else version_id, checksum)

    async def _base_address(self) -> str:
        """The bucket's own address, with a final slash: the client knows the rules of all regions and partitions."""
        if self._base is None:
            try:
                client, _ = await self._current()
                address = await client.generate_presigned_url("get_object", {"Bucket": self._uri.bucket, "Key": "k"})
            except SDK_ERRORS as error:
                raise translate(error, str(self._uri), anonymous=self._credentials is None) from error
            self._base = address.partition("?")[0].removesuffix("k")
        return self._base

    async def _ask(self, call: Callable[[S3Client], Awaitable[Answer]]) -> Answer:
        client, region = await self._current()
        try:
            return await call(client)
        except ClientError as error:
            told = region_told(error)
            if told is None or told == region or not await self._move(told):
                raise
        client, _ = await self._current()
        return await call(client)

    async def _current(self) -> tuple[S3Client, str]:
        async with self._opening:
            if self._client is None:
                self._client = await self._open_client(self._region)
            return self._client, self._region

    async def _move(self, region: str) -> bool:
        """Whether the bucket is asked in that region now; regions that send us to and fro are an error."""
        async with self._opening:
            if self._region == self._home:
                self._client = await self._open_client(region)
                self._region, self._base = region, None
            return self._region == region


@asynccontextmanager
async def connect(
    uri: BucketUri, endpoint: S3Endpoint, *, asker: Asker = ASK_ONCE, clock: Callable[[], float] = time.time
) -> AsyncIterator[S3Bucket]:
    """The bucket, without a request yet; its connections are closed at the end."""
    async with AsyncExitStack() as stack:

        def open_client(region: str) -> Awaitable[S3Client]:
            client: AbstractAsyncContextManager[S3Client] = s3_client(uri.bucket, endpoint, region)
            return stack.enter_async_context(client)

        yield S3Bucket(uri, endpoint, open_client, asker=asker, clock=clock)


_ROOT: Final = "ListBucketResult"
_SIZE: Final = re.compile(r"[0-9]{1,30}")


@dataclass(frozen=True, slots=True)
class S3Object:
    """One listed object. ``name`` is what S3 calls its key. ``etag`` is as it stands in the header of an answer, quotes included."""

    name: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class S3Page:
    """Objects in the order of their keys, and the token of the page after them, None at the end."""

    objects: tuple[S3Object, ...]
    following: str | None


def read_page(document: bytes) -> S3Page:
    """The page; blocking, for some milliseconds.

    Raises:
        NotAListingError: also for a listing that goes on and does not tell where, which must not pass for its end.
    """
    try:
        # Entity bombs are refused by expat itself.
        root = ET.fromstring(document)  # noqa: S314
    except ET.ParseError:
        raise NotAListingError("the answer is not XML") from None
    space, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise NotAListingError(f"the answer is a document {name[:100]!a}")
    prefix = f"{space}}}" if space else ""  # some servers leave the namespace out
    is_quoted = root.findtext(f"{prefix}EncodingType") == "url"
    key, etag, size = f"{prefix}Key", f"{prefix}ETag", f"{prefix}Size"
    try:
        objects = tuple(
            S3Object(_key(entry.findtext(key), is_quoted), _etag(entry.findtext(etag)), _size(entry.findtext(size, "")))
            for entry in root.iterfind(f"{prefix}Contents")
        )
    except ValueError as error:
        raise NotAListingError("the answer lists an object without key, ETag or size") from error
    if root.findtext(f"{prefix}IsTruncated") != "true":
        return S3Page(objects, None)
    following = root.findtext(f"{prefix}NextContinuationToken")
    if not following:
        raise NotAListingError("a listing goes on but does not tell where")
    return S3Page(objects, following)


def _key(text: str | None, is_quoted: bool) -> str:
    if not text:
        raise ValueError
    # As in a form: a space is "+", and "+" is "%2B".
    return unquote_plus(text, errors="strict") if is_quoted else text


def _size(text: str) -> int:
    if not _SIZE.fullmatch(text):  # int() would take "-5", "1_0" and the digits of every script
        raise ValueError
    return int(text)


def _etag(text: str | None) -> str:
    if not text:
        raise ValueError
    return text if text[0] == '"' else f'"{text}"'  # some servers list it without its quotes


# In the order of preference, with their length in bytes. Those that can be computed chunk by chunk come first, and of
# these the strongest; MD5 comes last because the ETag holds it for objects that state nothing else.
_STATED: Final = (
    (ChecksumKind.CRC64NVME, "x-amz-checksum-crc64nvme", 8),
    (ChecksumKind.CRC32C, "x-amz-checksum-crc32c", 4),
    (ChecksumKind.CRC32, "x-amz-checksum-crc32", 4),
    (ChecksumKind.SHA256, "x-amz-checksum-sha256", 32),
    (ChecksumKind.SHA1, "x-amz-checksum-sha1", 20),
    (ChecksumKind.MD5, "x-amz-checksum-md5", 16),
)
_MD5: Final = re.compile(r"[0-9a-fA-F]{32}")
_OF_PARTS: Final = re.compile(r'-[0-9]+"?$')
# With keys of KMS or of the customer's own, and in directory buckets, an ETag is something else of the same length.
_CUSTOMER_KEY: Final = "x-amz-server-side-encryption-customer-algorithm"
_DIRECTORY_BUCKET: Final = "EXPRESS_ONEZONE"


def stated_checksum(headers: Headers) -> Checksum | None:
    """The best checksum of the whole object, from an answer to a GET without a range or to a HEAD.

    S3 tells checksums only where ``x-amz-checksum-mode: ENABLED`` was asked for. One that cannot be read counts as absent.
    """
    stated_type = headers.get("x-amz-checksum-type")
    # Servers that do not tell types may state a checksum of the parts' checksums and leave its "-N" out.
    may_be_of_parts = stated_type is None and _OF_PARTS.search(headers.get("etag") or "")
    for kind, name, size in _STATED:
        if stated_type not in (None, "FULL_OBJECT") or (may_be_of_parts and kind is not ChecksumKind.CRC64NVME):
            continue  # there is no CRC64NVME of parts
        value = headers.get(name)
        if value is not None and (digits := _hex(value, size)):
            return Checksum(kind, digits)
    return _md5_of_etag(headers)


def _hex(value: str, size: int) -> str | None:
    """None for a composite of parts, which ends in ``-N``, and for anything else that is not base64 of this size."""
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest.hex() if len(digest) == size else None


def _md5_of_etag(headers: Headers) -> Checksum | None:
    etag = (headers.get("etag") or "").strip('"')
    if not _MD5.fullmatch(etag):  # of parts, "<md5 of their md5s>-N"; weak ones are not of the bytes
        return None
    if headers.get("x-amz-server-side-encryption") not in (None, "AES256") or headers.get(_CUSTOMER_KEY) is not None:
        return None
    if headers.get("x-amz-storage-class") == _DIRECTORY_BUCKET:
        return None
    return Checksum(ChecksumKind.MD5, etag.lower())
