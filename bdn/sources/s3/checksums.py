"""Which checksum of a whole object the head of an S3 answer states, if any that can be trusted to be one.

Sources: "Checking object integrity in Amazon S3" (types FULL_OBJECT and COMPOSITE) and the API reference of ``Object``, on
when an ETag is the MD5 of the content.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from bdn.core.ports import Headers
from bdn.core.source.upstream import Checksum, ChecksumKind

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
