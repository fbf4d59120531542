"""One page of ListObjectsV2, in every form that servers give it."""

from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import botocore.session
import pytest
from botocore.parsers import create_parser
from hypothesis import given
from hypothesis import strategies as st

from bdn.sources.s3.bucket import S3Object, S3Page, read_page
from bdn.sources.s3.errors import NotAListingError

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
    assert page == S3Page((S3Object("a/b", '"e"', 7), S3Object("c d", '"plain"', 0)), None)


def test_keys_are_taken_as_they_are_where_the_server_does_not_quote_them() -> None:
    assert read_page(document(entry("a+b%20c"))).objects[0].name == "a+b%20c"


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(keys=st.lists(KEYS, max_size=5), sizes=st.integers(0, 2**50))
def test_quoted_keys_are_read_as_the_sdk_reads_them(keys: list[str], sizes: int) -> None:
    head = "<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>"
    body = document(*(entry(quote_plus(key), size=sizes) for key in keys), head=head)
    theirs = create_parser("rest-xml").parse({"status_code": 200, "headers": {}, "body": body}, SHAPE)
    ours = read_page(body).objects
    assert [(quote_plus(found.name), found.etag, found.size) for found in ours] == [
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
    (document(head="<IsTruncated>true</IsTruncated>"), "does not tell where"),
    (document("<ETag>e</ETag><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key></Key><ETag>e</ETag><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key>k</Key><Size>1</Size>"), "without key, ETag or size"),
    (document("<Key>k</Key><ETag>e</ETag>"), "without key, ETag or size"),
    (document(entry("k", size="many")), "without key, ETag or size"),
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


@pytest.mark.parametrize("size", ["-5", "1_0", "٣", "", "1e3", "9" * 31])
def test_a_size_is_digits_and_nothing_else(size: str) -> None:
    with pytest.raises(NotAListingError, match="without key, ETag or size"):
        read_page(document(entry("a", size=size)))
