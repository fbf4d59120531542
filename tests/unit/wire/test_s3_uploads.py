"""Bodies in ``aws-chunked`` and lists of parts: what clients of S3 send, whole, in any pieces, and malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import digest_of
from bdn.core.errors import InvalidRequestError
from bdn.wire.s3_uploads import AwsChunked, error, part_digests

CONTENT = bytes(range(256)) * 100
SIGNED = b";chunk-signature=" + b"0" * 64


def encoded(size: int, extension: bytes, trailers: bytes) -> bytes:
    pieces = [CONTENT[at : at + size] for at in range(0, len(CONTENT), size)]
    chunks = [b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join([*chunks, b"0", extension, b"\r\n", trailers, b"\r\n"])


@given(st.sampled_from([8192, 9000, 100_000]), st.sampled_from([b"", SIGNED]), st.integers(1, 30_000))
def test_body_in_aws_chunked__in_any_pieces__is_decoded_with_its_trailers(
    size: int, extension: bytes, cut: int
) -> None:
    body, decoder = encoded(size, extension, b"X-Amz-Checksum-CRC32:AAAA\r\n"), AwsChunked()
    decoded = b"".join(bytes(part) for at in range(0, len(body), cut) for part in decoder.feed(body[at : at + cut]))
    assert (decoded, decoder.is_over) == (CONTENT, True)
    assert decoder.trailers == {"x-amz-checksum-crc32": "AAAA"}


@pytest.mark.parametrize("body", [
    b"\r\n",
    b"x\r\n",
    b"-1\r\n",
    b"123456789\r\n",
    b"1\n",
    b"1\r\nab\r\n",
    b"1\r\na\r\n1\r\n",
    b"0\r\nno colon\r\n",
    b"0\r\na:b\r\nA: b\r\n",
    b"0\r\n" + b"".join(b"%d:b\r\n" % number for number in range(17)),
    b"0\r\n\r\nmore",
    b"1;" + b"x" * 1024,
], ids=lambda body: body[:20])  # fmt: skip
def test_malformed_body_in_aws_chunked__is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        list(AwsChunked().feed(body))


def test_body_in_aws_chunked__that_is_cut_off__is_not_over() -> None:
    whole = encoded(8192, b"", b"")
    for body in (b"", whole[:8000], whole[:-2]):
        decoder = AwsChunked()
        list(decoder.feed(body))
        assert not decoder.is_over


def listed(*parts: tuple[object, str], begin: str = "<CompleteMultipartUpload xmlns='x'>") -> bytes:
    inside = "".join(f"<Part><ETag>{tag}</ETag><PartNumber>{number}</PartNumber></Part>" for number, tag in parts)
    return f"{begin}{inside}</CompleteMultipartUpload>".encode()


ONE, OTHER = digest_of(b"1"), digest_of(b"2")


def test_list_of_parts__names_digests_in_order() -> None:
    assert part_digests(listed((1, f"&quot;{ONE}&quot;"), (10_000, str(OTHER)))) == [ONE, OTHER]


@pytest.mark.parametrize("document", [
    b"",
    b"\xff",
    b"<a/>",
    listed((2, str(ONE)), (1, str(OTHER))),
    listed((1, str(ONE)), (1, str(ONE))),
    listed((0, str(ONE))),
    listed((10_001, str(ONE))),
    listed(("x", str(ONE))),
    listed((1, "abc")),
    listed((1, "&b;"), begin='<!DOCTYPE a [<!ENTITY a "x"><!ENTITY b "&a;&a;">]><CompleteMultipartUpload>'),
])  # fmt: skip
def test_malformed_list_of_parts__is_refused(document: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        part_digests(document)


def test_message_of_an_error__is_escaped() -> None:
    assert b"<Message>&lt;a&gt; &amp;</Message>" in error("Code", "<a> &")
