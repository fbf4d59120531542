"""Parses the answers of S3: a page of a listing, the checksum of an object, an error."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_plus, urlsplit
from xml.etree import ElementTree as ET

from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceArchivedError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Checksum, ChecksumKind, Headers
from bdn.net.unreachable import unreachable
from bdn.sources.bucket_source import BucketObject, BucketPage, NotAListingError
from bdn.wire.http_fields import parse_retry_after

LISTING: Final = "UnreadListing"  # where the client leaves the body of a listing, for ``read_page``
_ROOT: Final = "ListBucketResult"
_SIZE: Final = re.compile(r"[0-9]{1,30}")


def read_page(document: bytes) -> BucketPage:
    """Parse a page, with ETags quoted as in the header of an answer. Blocking, for some milliseconds.

    Raises:
        NotAListingError: also for a truncated listing without a continuation token, which must not pass for the last
            page.
    """
    try:
        # expat itself refuses entity bombs.
        root = ET.fromstring(document)  # noqa: S314
    except ET.ParseError:
        raise NotAListingError("the answer is not XML") from None
    space, _, name = root.tag.rpartition("}")
    if name != _ROOT:
        raise NotAListingError(f"the answer is a document {name[:100]!a}")
    prefix = f"{space}}}" if space else ""  # some servers omit the namespace
    is_quoted = root.findtext(f"{prefix}EncodingType") == "url"
    key, etag, size, modified = (f"{prefix}{name}" for name in ("Key", "ETag", "Size", "LastModified"))
    try:
        objects = tuple(
            BucketObject(
                _key(entry.findtext(key), is_quoted),
                _size(entry.findtext(size, "")),
                _etag(entry.findtext(etag)),
                modified=entry.findtext(modified, ""),
            )
            for entry in root.iterfind(f"{prefix}Contents")
        )
    except ValueError as error:
        raise NotAListingError("the answer lists an object without key, ETag or size") from error
    if root.findtext(f"{prefix}IsTruncated") != "true":
        return BucketPage(objects, None)
    following = root.findtext(f"{prefix}NextContinuationToken")
    if not following:
        raise NotAListingError("a listing is truncated, and has no continuation token")
    return BucketPage(objects, following)


def _key(text: str | None, is_quoted: bool) -> str:
    if not text:
        raise ValueError
    # As in a form: a space is "+", and "+" is "%2B".
    return unquote_plus(text, errors="strict") if is_quoted else text


def _size(text: str) -> int:
    if not _SIZE.fullmatch(text):  # int() would accept "-5", "1_0" and the digits of every script
        raise ValueError
    return int(text)


def _etag(text: str | None) -> str:
    if not text:
        raise ValueError
    return text if text[0] == '"' else f'"{text}"'  # some servers list it unquoted


# In order of preference, with lengths in bytes. Checksums that can be computed chunk by chunk come first, the strongest
# of them before the weaker; MD5 comes last because the ETag provides it for objects without a checksum.
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
# With keys of KMS or of the customer, and in directory buckets, an ETag of this length is not an MD5.
_CUSTOMER_KEY: Final = "x-amz-server-side-encryption-customer-algorithm"
_DIRECTORY_BUCKET: Final = "EXPRESS_ONEZONE"


def stated_checksum(headers: Headers) -> Checksum | None:
    """The best checksum of the whole object, from an answer to a GET without a range or to a HEAD.

    S3 returns checksums only for requests with ``x-amz-checksum-mode: ENABLED``. An unreadable one counts as absent.
    """
    stated_type = headers.get("x-amz-checksum-type")
    # Servers that omit the type may return a checksum of the parts' checksums without its "-N".
    may_be_of_parts = stated_type is None and _OF_PARTS.search(headers.get("etag") or "")
    for kind, name, size in _STATED:
        if stated_type not in (None, "FULL_OBJECT") or (may_be_of_parts and kind is not ChecksumKind.CRC64NVME):
            continue  # a CRC64NVME of parts does not exist
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
    if not _MD5.fullmatch(etag):  # an ETag of parts is "<md5 of their md5s>-N"; weak ETags do not name bytes
        return None
    if headers.get("x-amz-server-side-encryption") not in (None, "AES256") or headers.get(_CUSTOMER_KEY) is not None:
        return None
    if headers.get("x-amz-storage-class") == _DIRECTORY_BUCKET:
        return None
    return Checksum(ChecksumKind.MD5, etag.lower())


# The last three are what an answer that is not S3's raises when it is parsed; OSError covers timeouts and what aiohttp
# passes on.
SDK_ERRORS: Final = (BotoCoreError, ClientError, OSError, KeyError, TypeError, ValueError)

BAD_CREDENTIALS: Final = {
    "InvalidAccessKeyId": "the access key does not exist",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}
OTHER_REGION: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_OTHER_REGION_STATUSES: Final = (301, 302, 307)
_REGION: Final = re.compile(r"[a-z]{2,12}(?:-[a-z0-9]{1,20}){1,4}")  # becomes part of a host name
_PATH_STYLE_REFUSED: Final = ("SecondLevelDomainForbidden", "VirtualHostDomainRequired", "PathStyleDomainForbidden")
SLOW_DOWN: Final = ("RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests")


def translate(error: Exception, source: str, *, anonymous: bool, path: str | None = None) -> BdnError:
    """Map one of ``SDK_ERRORS`` to our error; ``path`` is of the listed object whose HEAD failed.

    The client's own text is left out: it may contain addresses and keys.
    """
    match error:
        case ClientError():
            of_head = _of_head(error, source, path) if path is not None else None
            return of_head or _answered(error, source, anonymous=anonymous)
        case ParamValidationError():
            return InvalidSourceError(source, f"{source}: S3 cannot have a bucket of this name")
        case BotoCoreError() | OSError():
            return unreachable(source, f"S3{_where(error)} did not answer ({type(error).__name__})", error)
        case NotAListingError():
            return UpstreamUnavailableError(source, str(error))
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like S3's ({type(error).__name__})")


_ARCHIVED: Final = "InvalidObjectState"
_KEY: Final = "Allow kms:Decrypt on the key that encrypts the object to the identity that reads it, in the key's policy too, and enable the key"
_ACCOUNTS: Final = ("AccountProblem", "InvalidPayer", "NotEntitled", "NotSignedUp")  # the third is R2's
_CODE: Final = re.compile(r"[A-Za-z0-9.]{1,80}")


def read_refusal(source: str, path: str, status: int, body: bytes) -> BdnError | None:
    """Why the object at ``path`` cannot be read with any address, from the first bytes of a refused GET's answer.

    None: another address may work, or the status says it all. The message is left out: it may contain keys and
    addresses.
    """
    try:
        document = ET.fromstring(body)  # noqa: S314 - as in ``read_page``
    except (ET.ParseError, ValueError):
        return None
    told = {child.tag.rpartition("}")[2]: child.text or "" for child in document}
    code, message = told.get("Code", ""), told.get("Message", "")
    if not _CODE.fullmatch(code):
        return None
    if code == _ARCHIVED:
        tier = told.get("AccessTier") or told.get("StorageClass") or ""
        return SourceArchivedError(source, path, tier if re.fullmatch(r"[A-Z_]{1,40}", tier) else code)
    if denial := _denial(code, message, status):
        return AuthRequiredError(source, f"{path}: {denial[0]}", denial[1])
    return _misplaced(code, status, source)


def _denial(code: str, message: str, status: int) -> tuple[str, str] | None:
    """What an identity or account lacks, and the remedy, if no other address of the object helps."""
    if code.startswith("KMS.") or (code == "AccessDenied" and "kms" in message.lower()):
        return f"{code} for the key of AWS KMS that encrypts it", _KEY
    if status == 400 and code in ("InvalidRequest", "InvalidArgument") and "Server Side Encryption" in message:
        remedy = "Copy the object to one that is encrypted with a key of the service, and mirror the copy"
        return "it is encrypted with a customer-provided key (SSE-C)", remedy
    if code in _ACCOUNTS:
        return (
            code,
            "The owner of the account that reads, or pays, has to fix it at the cloud: it is not signed up, or was suspended",
        )
    return None


def region_told(error: ClientError) -> str | None:
    """The region that S3 redirects to, if that is the reason of the failure."""
    code, status, headers = facts_of(error)
    if code not in OTHER_REGION and status not in (*_OTHER_REGION_STATUSES, 400):
        return None
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    return region if isinstance(region, str) and _REGION.fullmatch(region) else None


def _of_head(error: ClientError, source: str, path: str) -> BdnError | None:
    """A failed HEAD has a status and no code."""
    _, status, headers = facts_of(error)
    match status:
        case 412:
            return SourceChangedError(source, path, "its ETag changed")
        case 404 | 405 | 410:  # 405: the version is a delete marker
            return SourceChangedError(source, path, "it no longer exists")
        case 503:  # usually "Slow Down"
            return UpstreamRateLimitedError(source, parse_retry_after(headers))
        case 400:
            reason = f"{path}: status 400: the credentials have expired, or the object is encrypted with a customer-provided key"
            return AuthRequiredError(source, f"{reason} (SSE-C) and cannot be read")
        case _:
            return None


def _misplaced(code: str, status: int, source: str) -> BdnError | None:
    """An error of the bucket's region, addressing or state, which other credentials do not fix."""
    if code in OTHER_REGION or status in _OTHER_REGION_STATUSES:
        return InvalidSourceError(source, f'{source} is in another region ({code}); add "aws_region" to the secret')
    if code in _PATH_STYLE_REFUSED:
        reason = "the service refuses path-style addresses; the operator has to set BDN_SOURCE_S3_ADDRESSING=virtual"
        return InvalidSourceError(source, f"{source}: {reason} ({code})")
    if code == "AllAccessDisabled":
        return SourceNotFoundError(source, f"the bucket's owner or the service has disabled it ({code})")
    return None


def _answered(error: ClientError, source: str, *, anonymous: bool) -> BdnError:
    code, status, headers = facts_of(error)
    if misplaced := _misplaced(code, status, source):
        return misplaced
    if code in BAD_CREDENTIALS:
        return AuthRequiredError(source, f"{code}: {BAD_CREDENTIALS[code]}")
    if status in (401, 403):
        who = "anonymous reading is not allowed" if anonymous else "these credentials may not read it"
        if not anonymous and code in ("403", "AccessDenied", "Forbidden"):
            who += "; if the bucket is requester pays, the operator has to set BDN_SOURCE_S3_REQUESTER_PAYS=true"
        if code == "403":  # of a HEAD, which has no code
            who += "; if it is encrypted with a key of AWS KMS, they need kms:Decrypt"
        return AuthRequiredError(source, f"{code}: {who}")
    if code in SLOW_DOWN or status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status >= 500:
        return UpstreamUnavailableError(source, f"S3 answered {status} {code}", parse_retry_after(headers))
    reason = "the bucket does not exist" if code == "NoSuchBucket" else f"S3 answered {status} {code}"
    return SourceNotFoundError(source, reason)


def _where(error: BotoCoreError | OSError) -> str:
    """The host, if the client's error contains the address: the operator can fix a name that does not resolve."""
    address = error.kwargs.get("endpoint_url") if isinstance(error, BotoCoreError) else None
    return f" at {urlsplit(address).hostname}" if isinstance(address, str) else ""


def facts_of(error: ClientError) -> tuple[str, int, Mapping[str, str]]:
    """Error code, status and headers of a refusal."""
    metadata = error.response.get("ResponseMetadata", {})
    code = str(error.response.get("Error", {}).get("Code", "Unknown"))
    return code, int(metadata.get("HTTPStatusCode", 0)), metadata.get("HTTPHeaders", {})
