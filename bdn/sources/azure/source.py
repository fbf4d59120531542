"""Containers of Azure Blob Storage: listings and signed addresses of blobs, by the REST API.

An account's key signs one token for a container, which lists it and reads its blobs (docs/adr/0057).
"""

import asyncio
import binascii
import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import ClassVar, Final
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree as ET

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceArchivedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.upstream import Checksum, ChecksumKind, Headers, Location, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.net.http1.answer import Answer
from bdn.sources.bucket_source import BucketObject, BucketPage, BucketSource, NotAListingError
from bdn.sources.requests import SourceRequests, open_requests, refusal
from bdn.sources.settings import account_address
from bdn.sources.sign_in import AzureSecret, Secret, SourceContext, azure_secret
from bdn.wire.http_fields import parse_retry_after

_VERSION: Final = "2021-12-02"  # of the API
_HEADERS: Final = {"x-ms-version": _VERSION}  # without it an anonymous request gets a version that quotes no ETag
_TOKEN_SECONDS: Final = 3600
_LONGEST_PAGE: Final = 16 * 1024 * 1024  # bytes; 1000 names of 1024 characters, each of which may take 9 bytes
_CODE: Final = re.compile(r"[A-Za-z]{1,60}")
_CODE_OF_BODY: Final = re.compile(rb"<Code>([A-Za-z]{1,60})</Code>")
_ARCHIVED: Final = ("BlobArchived", "BlobBeingRehydrated")
_CUSTOMER_KEY: Final = "BlobUsesCustomerSpecifiedEncryption"


def container_token(account: str, container: str, key: bytes, expires_at: int) -> str:
    """A service SAS that reads and lists a container.

    Source: "Create a service SAS", version 2020-12-06 and later: fields that are not used are empty lines.
    """
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
    text = "\n".join(("rl", "", ends, f"/blob/{account}/{container}", "", "", "", _VERSION, "c", *[""] * 7))
    signature = b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
    return urlencode({"sv": _VERSION, "sr": "c", "sp": "rl", "se": ends, "sig": signature})


class AzureSource(BucketSource):
    """``secret`` None reads anonymously. A blob's ETag changes with each write."""

    is_size_in_identity: ClassVar[bool] = False

    def __init__(
        self, uri: BucketUri, context: SourceContext, requests: SourceRequests, secret: AzureSecret | None
    ) -> None:
        endpoint = account_address(context.settings.azure_endpoint_url, uri.account)
        super().__init__(uri, context.reader, "azure", endpoint)
        self._base = f"{endpoint}/{uri.bucket}"
        self._clock = context.clock
        self._requests = requests
        self._secret = secret

    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        query = {"restype": "container", "comp": "list", "include": "metadata", "maxresults": limit}
        query |= {name: text for name, text in (("prefix", prefix), ("marker", token)) if text}
        sas, _ = self._token()
        url = f"{self._base}?{urlencode(query, quote_via=quote)}{sas and '&'}{sas}"
        content = await self._requests.ask("GET", url, _HEADERS, self._read)
        try:
            return await asyncio.to_thread(read_page, content)
        except NotAListingError as error:
            raise UpstreamUnavailableError(str(self._uri), str(error)) from None

    async def locate(self, file: UpstreamFile) -> Location:
        """A signed address, or the plain one for anonymous reading. Sends no request."""
        sas, expires_at = self._token()
        return Location(
            f"{self._base}/{quote(file.handle)}{sas and '?'}{sas}",
            (*_HEADERS.items(), ("If-Match", file.version)),
            etag=file.version,
            expires_at=expires_at,
            refused=partial(read_refusal, str(self._uri), file.path),
            may_be_encoded=True,  # Azure returns bytes as they were put, with the encoding that was put with them
        )

    def _token(self) -> tuple[str, float | None]:
        """The query that signs a request, empty for anonymous reading, and its expiry if known."""
        if self._secret is None or self._secret.account_key is None:
            return self._secret.sas_token if self._secret else "", None
        expires_at = int(self._clock()) + _TOKEN_SECONDS
        return container_token(self._uri.account, self._uri.bucket, self._secret.account_key, expires_at), expires_at

    def _read(self, answer: Answer) -> bytes:
        if answer.status != 200:
            raise self._refused(answer.status, answer.headers)
        content = bytearray(_LONGEST_PAGE)
        with memoryview(content) as buffer:
            size = answer.fill(buffer, StallPolicy())
        if answer.length not in (None, size):
            raise ConnectionResetError(f"the answer has {size} of {answer.length} bytes")
        return bytes(content[:size])  # a longer one is cut off, and not XML

    def _refused(self, status: int, headers: Headers) -> BdnError:
        source, code = str(self._uri), headers.get("x-ms-error-code") or ""
        said = f"Azure answered {status} {code if _CODE.fullmatch(code) else ''}".rstrip()
        if code == "ServerBusy":
            return UpstreamRateLimitedError(source, parse_retry_after(headers))
        if self._secret is None and status in (401, 403, 404, 409):  # Azure hides from strangers what exists
            return AuthRequiredError(source, f"{said}: it does not exist, or anonymous reading is not allowed")
        return refusal(source, said, status, headers, _DENIALS.get(code, _DENIAL))


_DENIAL: Final = "the secret's key or token is wrong, or has expired"
_DENIALS: Final = {
    "AuthorizationPermissionMismatch": "the SAS token needs the permissions Read and List",
    "AuthorizationResourceTypeMismatch": "the SAS token needs the resource types Container and Object",
    "AuthorizationFailure": "the SAS token does not allow it, or the account's network rules do not admit this mirror",
    "KeyBasedAuthenticationNotPermitted": "the account allows no keys and no SAS tokens that keys sign",
}


def read_refusal(source: str, path: str, status: int, body: bytes) -> BdnError | None:  # noqa: ARG001 - as others
    """Why no address can read a blob, from the answer to a GET. None: another may, or the status says it all."""
    found = _CODE_OF_BODY.search(body)
    code = found[1].decode() if found else ""
    if code in _ARCHIVED:
        return SourceArchivedError(source, path, code)
    if code == _CUSTOMER_KEY:
        remedy = "Copy the blob to one that is encrypted with a key of the service, and mirror the copy"
        return AuthRequiredError(source, f"{path}: it is encrypted with a customer-provided key", remedy)
    return None


def read_page(document: bytes) -> BucketPage:
    """Parse a page, without directories: accounts with a hierarchical namespace list them, as empty blobs. Blocking.

    Raises ``NotAListingError``.
    """
    try:
        root = ET.fromstring(document)  # noqa: S314 - expat itself refuses entity bombs
    except ET.ParseError:
        raise NotAListingError("the answer is not XML") from None
    if root.tag != "EnumerationResults" or root.find("Blobs") is None:
        raise NotAListingError(f"the answer is a document {root.tag[:100]!a}")
    try:
        blobs = tuple(_blob(entry) for entry in root.iterfind("Blobs/Blob") if not _is_directory(entry))
    except ValueError as error:
        raise NotAListingError("the answer lists a blob without name, ETag or size") from error
    return BucketPage(blobs, root.findtext("NextMarker") or None)


def _is_directory(entry: ET.Element) -> bool:
    told = (entry.findtext("Properties/ResourceType"), entry.findtext("Metadata/hdi_isfolder"))
    return told[0] == "directory" or (told[1] or "").lower() == "true"


def _blob(entry: ET.Element) -> BucketObject:
    named = entry.find("Name")
    name, etag = "" if named is None else named.text or "", entry.findtext("Properties/Etag", "")
    size = entry.findtext("Properties/Content-Length", "")
    if not name or not etag or not re.fullmatch("[0-9]{1,30}", size):
        raise ValueError
    if named is not None and named.get("Encoded") == "true":  # it holds a character that XML cannot
        name = unquote(name, errors="strict")
    md5 = _md5(entry.findtext("Properties/Content-MD5", ""))
    return BucketObject(name, int(size), etag if etag[0] == '"' else f'"{etag}"', md5)


def _md5(stated: str) -> Checksum | None:
    """Of the whole blob, if its writer stated one."""
    try:
        digest = b64decode(stated, validate=True)
    except binascii.Error:
        return None
    return Checksum(ChecksumKind.MD5, digest.hex()) if len(digest) == 16 else None


@asynccontextmanager
async def open_azure(uri: BucketUri, context: SourceContext) -> AsyncIterator[AzureSource]:
    """Open the source without a request; its connections are closed at the end."""
    secret = azure_secret(context.sign_in) if isinstance(context.sign_in, Secret) else None
    async with open_requests(str(uri), context) as requests:
        yield AzureSource(uri, context, requests, secret)
