"""What the head of an S3 answer states about the whole object."""

import base64
import http.client
import io

import pytest

from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.sources.s3.bucket import stated_checksum

MD5 = "0123456789abcdef0123456789abcdef"
ETAG = {"etag": f'"{MD5}"'}
OF_PARTS = {"etag": f'"{MD5}-2"'}
AN_MD5 = Checksum(ChecksumKind.MD5, MD5)


def b64(size: int) -> str:
    return base64.b64encode(bytes(range(size))).decode()


def hexed(size: int) -> str:
    return bytes(range(size)).hex()


CRC64 = {"x-amz-checksum-crc64nvme": b64(8)}
CRC32C = {"x-amz-checksum-crc32c": b64(4)}
CRC32 = {"x-amz-checksum-crc32": b64(4)}
SHA256 = {"x-amz-checksum-sha256": b64(32)}
SHA1 = {"x-amz-checksum-sha1": b64(20)}
STATED_MD5 = {"x-amz-checksum-md5": b64(16)}
FULL = {"x-amz-checksum-type": "FULL_OBJECT"}
COMPOSITE = {"x-amz-checksum-type": "COMPOSITE"}

TABLE = [
    # each kind, by itself
    (CRC64, Checksum(ChecksumKind.CRC64NVME, hexed(8))),
    (CRC32C, Checksum(ChecksumKind.CRC32C, hexed(4))),
    (CRC32, Checksum(ChecksumKind.CRC32, hexed(4))),
    (SHA256, Checksum(ChecksumKind.SHA256, hexed(32))),
    (SHA1, Checksum(ChecksumKind.SHA1, hexed(20))),
    (STATED_MD5, Checksum(ChecksumKind.MD5, hexed(16))),
    (CRC64 | FULL, Checksum(ChecksumKind.CRC64NVME, hexed(8))),
    # the order of preference
    (STATED_MD5 | SHA1 | SHA256 | CRC32 | CRC32C | CRC64 | ETAG, Checksum(ChecksumKind.CRC64NVME, hexed(8))),
    (STATED_MD5 | SHA1 | SHA256 | CRC32 | CRC32C | ETAG, Checksum(ChecksumKind.CRC32C, hexed(4))),
    (STATED_MD5 | SHA1 | SHA256 | CRC32 | ETAG, Checksum(ChecksumKind.CRC32, hexed(4))),
    (STATED_MD5 | SHA1 | SHA256 | ETAG, Checksum(ChecksumKind.SHA256, hexed(32))),
    (STATED_MD5 | SHA1 | ETAG, Checksum(ChecksumKind.SHA1, hexed(20))),
    (STATED_MD5 | ETAG, Checksum(ChecksumKind.MD5, hexed(16))),
    # of parts
    (CRC32 | COMPOSITE, None),
    (CRC32 | COMPOSITE | ETAG, AN_MD5),
    (CRC32 | {"x-amz-checksum-type": "SOMETHING_NEW"}, None),
    ({"x-amz-checksum-crc32": f"{b64(4)}-3"}, None),
    ({"x-amz-checksum-crc32": f"{b64(4)}-3"} | SHA1, Checksum(ChecksumKind.SHA1, hexed(20))),
    ({"x-amz-checksum-crc32": f"{b64(4)}-3"} | FULL, None),
    (CRC32 | OF_PARTS, None),
    (SHA256 | CRC32C | OF_PARTS, None),
    (CRC32 | OF_PARTS | FULL, Checksum(ChecksumKind.CRC32, hexed(4))),
    (CRC64 | CRC32 | OF_PARTS, Checksum(ChecksumKind.CRC64NVME, hexed(8))),
    # not what they say
    ({"x-amz-checksum-crc32": b64(8)}, None),
    ({"x-amz-checksum-crc64nvme": b64(4)} | CRC32, Checksum(ChecksumKind.CRC32, hexed(4))),
    ({"x-amz-checksum-crc32": "not base64!"}, None),
    ({"x-amz-checksum-crc32": "ü"}, None),
    ({"x-amz-checksum-crc32": ""}, None),
    ({"x-amz-checksum-xxhash3": b64(8)}, None),
    # the ETag
    (ETAG, AN_MD5),
    ({"etag": MD5}, AN_MD5),
    ({"etag": f'"{MD5.upper()}"'}, AN_MD5),
    ({"etag": f'"{MD5}-2"'}, None),
    ({"etag": f'W/"{MD5}"'}, None),
    ({"etag": f'"{MD5[:-1]}g"'}, None),
    ({"etag": f'"{MD5}00"'}, None),
    ({"etag": ""}, None),
    ({}, None),
    # ... and whose keys encrypt the object
    (ETAG | {"x-amz-server-side-encryption": "AES256"}, AN_MD5),
    (ETAG | {"x-amz-server-side-encryption": "aws:kms"}, None),
    (ETAG | {"x-amz-server-side-encryption": "aws:kms:dsse"}, None),
    (ETAG | {"x-amz-server-side-encryption": "aws:fsx"}, None),
    (ETAG | {"x-amz-server-side-encryption-customer-algorithm": "AES256"}, None),
    (ETAG | {"x-amz-storage-class": "EXPRESS_ONEZONE"}, None),
    (ETAG | {"x-amz-storage-class": "STANDARD_IA"}, AN_MD5),
    (ETAG | CRC32 | {"x-amz-server-side-encryption": "aws:kms"}, Checksum(ChecksumKind.CRC32, hexed(4))),
]


@pytest.mark.parametrize(("headers", "expected"), TABLE)
def test_the_best_checksum_of_the_whole_object_is_taken(headers: dict[str, str], expected: Checksum | None) -> None:
    assert stated_checksum(headers) == expected


def test_names_may_come_in_any_case_where_the_head_allows_it() -> None:
    head = http.client.parse_headers(io.BytesIO(f"X-Amz-Checksum-CRC32: {b64(4)}\r\nETag: {MD5}\r\n\r\n".encode()))
    assert stated_checksum(head) == Checksum(ChecksumKind.CRC32, hexed(4))
