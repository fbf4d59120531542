"""What the answers of S3 mean: pages of ListObjectsV2 in every form that servers give them, and checksums of whole objects."""

import base64
import http.client
import io
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import botocore.session
import pytest
from botocore.parsers import create_parser
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.sources.bucket_source import BucketObject, BucketPage, NotAListingError
from bdn.sources.s3.answers import read_page, stated_checksum

NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


SHAPE = botocore.session.get_session().get_service_model("s3").operation_model("ListObjectsV2").output_shape


def document(*entries: str, head: str = "", namespace: str = NAMESPACE) -> bytes:
    contents = "".join(f"<Contents>{entry}</Contents>" for entry in entries)
    return f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult{namespace}>{head}{contents}</ListBucketResult>'.encode()


def entry(key: str, etag: str = "&quot;e&quot;", size: int | str = 1) -> str:
    return f"<Key>{escape(key)}</Key><LastModified>2026-11-21T09:00:00.000Z</LastModified><ETag>{etag}</ETag><Size>{size}</Size>"


@pytest.mark.parametrize("namespace", [NAMESPACE, "", ' xmlns="urn:another"'])
def test_keys_etags_and_sizes_are_read_with_any_namespace(namespace: str) -> None:
    page = read_page(document(entry("a/b", size=7), entry("c d", "plain", 0), namespace=namespace))
    assert page == BucketPage((BucketObject("a/b", 7, '"e"'), BucketObject("c d", 0, '"plain"')), None)


def test_keys_are_taken_as_they_are_where_the_server_does_not_quote_them() -> None:
    assert read_page(document(entry("a+b%20c"))).objects[0].name == "a+b%20c"


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(keys=st.lists(KEYS, max_size=5), sizes=st.integers(0, 2**50))
def test_quoted_keys_are_read_as_the_sdk_reads_them(keys: list[str], sizes: int) -> None:
    head = "<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>"
    body = document(*(entry(quote_plus(key), size=sizes) for key in keys), head=head)
    theirs = create_parser("rest-xml").parse({"status_code": 200, "headers": {}, "body": body}, SHAPE)
    ours = read_page(body).objects
    assert [(quote_plus(found.name), found.version, found.size) for found in ours] == [
        (found["Key"], found["ETag"], found["Size"]) for found in theirs.get("Contents", ())
    ]
    assert [found.name for found in ours] == keys


@pytest.mark.parametrize(("head", "following"), [
    ("", None),
    ("<IsTruncated>false</IsTruncated><NextContinuationToken>t</NextContinuationToken>", None),
    ("<IsTruncated>true</IsTruncated><NextContinuationToken>t/+=</NextContinuationToken>", "t/+="),
])  # fmt: skip
def test_the_token_of_the_next_page_counts_where_there_is_one(head: str, following: str | None) -> None:
    assert read_page(document(head=head)).following == following


@pytest.mark.parametrize(("body", "said"), [
    (b"", "not XML"),
    (b"not a listing", "not XML"),
    (document(entry("a"))[:-10], "not XML"),
    (b"<html></html>", "'html'"),
    (b"<Error><Code>SlowDown</Code></Error>", "'Error'"),
    (document(head="<IsTruncated>true</IsTruncated>"), "has no continuation token"),
    (document("<ETag>e</ETag><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key></Key><ETag>e</ETag><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key>k</Key><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key>k</Key><ETag>e</ETag>"), "without key, ETag or size"),
    *((document(entry("k", size=size)), "without key, ETag or size")
      for size in ("many", "-5", "1_0", "٣", "", "1e3", "9" * 31)),
    (document(entry("%ff"), head="<EncodingType>url</EncodingType>"), "without key, ETag or size"),
])  # fmt: skip
def test_anything_else_is_no_listing(body: bytes, said: str) -> None:
    with pytest.raises(NotAListingError, match=said):
        read_page(body)


def test_an_entity_bomb_is_refused() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY e0 "{"x" * 1000}">{entities}]><ListBucketResult>&e11;</ListBucketResult>'
    with pytest.raises(NotAListingError):
        read_page(bomb.encode())


# --- checksums ---

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
