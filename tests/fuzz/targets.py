"""Every parser of bytes or text that others send: valid forms to start from, and the errors that it may answer with.

A target returns whatever it read, or raises one of ``errors``; anything else is a defect. Where there is a form to write, what
was read is written and read again, and must be the same.
"""

import base64
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import (
    CHUNK_SIZE,
    Digest,
    FileLayout,
    MalformedDocumentError,
    Slice,
    UnsafePathError,
    digest_of,
    normalise_path,
)
from bdn.core.egress import EgressPolicy
from bdn.core.errors import BdnError, GrantInvalidError, InvalidMountError, SecretMalformedError
from bdn.core.listing import ListingRoot, listed_in
from bdn.core.manifest import Root, files_of
from bdn.core.source.uri import Patterns, compile_pattern, normalise_mount, parse_source, select
from bdn.core.units import format_size, parse_size
from bdn.net.chunk_server.messages import body_size, find_head
from bdn.net.chunk_server.messages import parse_head as parse_request
from bdn.net.http1.answer import parse_head as parse_answer
from bdn.net.http1.connection import ProtocolError
from bdn.sources.bucket_source import NotAListingError
from bdn.sources.s3.answers import read_page
from bdn.sources.sign_in import Secret, hugging_face_token, s3_credentials, service_account_key
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, GrantVerifier, new_signing_key
from bdn.wire.heartbeat_schema import Heartbeat
from bdn.wire.http_fields import (
    HeadRefusedError,
    UnsatisfiableRangeError,
    format_range,
    parse_chunk_path,
    parse_content_range,
    parse_push_path,
    parse_range,
    parse_retry_after,
    push_path,
)
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody
from bdn.wire.shapes import error_from
from node_agent.fill.part import Bitmap
from node_agent.stage.stage import StageRecord
from tests.support.content.layouts import held_of

NOW: Final = 1_800_000_000.0


@dataclass(frozen=True)
class Target:
    """One parser. ``run`` takes any bytes."""

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...] = field(repr=False)


def text(content: bytes) -> str:
    """Bytes as text in a way that reaches every text, lone surrogates included."""
    return content.decode("utf-8", "surrogateescape")


def _source(content: bytes) -> object:
    uri = parse_source(text(content))
    assert parse_source(str(uri)) == uri
    return uri


def _path(content: bytes) -> object:
    given = text(content)
    try:
        path = normalise_path(given)
    except UnsafePathError as error:
        assert str(error).isprintable()  # noqa: PT017 - a refusal is a result as well
        raise
    assert path == normalise_path(path) == posixpath.normpath(given)
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
    assert not {"\0", "\\"} & set(path)
    assert max(len(segment.encode()) for segment in path.split("/")) <= 255
    return path


def _mount(content: bytes) -> object:
    given = text(content)
    mount = normalise_mount(given)
    assert mount == normalise_mount(mount) == posixpath.normpath(given).replace("//", "/")
    assert mount.startswith("/")
    assert not {"", ".", ".."} & set(mount.split("/")[1:])
    assert "\0" not in mount
    return mount


def _patterns(content: bytes) -> object:
    pattern, _, path = text(content).partition("\n")
    compile_pattern(pattern)
    return select([path], Patterns((pattern,), (pattern,)))


def _root(content: bytes) -> object:
    root = Root.parse(content)
    assert Root.parse(root.content) == root
    return root


def _page(content: bytes) -> object:
    files = list(files_of([content]))
    assert [file.path for file in files] == sorted({file.path for file in files})
    return files


def _range(content: bytes) -> object:
    part = parse_range(text(content), 1000)
    if part is not None:
        assert 0 <= part.start < part.stop <= 1000
        assert parse_range(format_range(part), 1000) == part
    return part


def _content_range(content: bytes) -> object:
    found = parse_content_range(text(content))
    if found is not None:
        assert 0 <= found[0].start < found[0].stop <= found[1]
    return found


def _size(content: bytes) -> object:
    size = parse_size(text(content))
    assert size >= 0
    format_size(size)
    return size


def _retry_after(content: bytes) -> object:
    name, _, value = text(content).partition("|")
    seconds = parse_retry_after({"retry-after" if name == "r" else "ratelimit": value})
    assert seconds is None or seconds >= 0
    return seconds


def _request_head(content: bytes) -> object:
    if find_head(bytearray(content), 0) != len(content):
        raise HeadRefusedError(400, "not one head")
    return parse_request(content).bearer


def _body_size(content: bytes) -> object:
    if find_head(bytearray(content), 0) != len(content):
        raise HeadRefusedError(400, "not one head")
    size = body_size(parse_request(content), CHUNK_SIZE)
    assert 0 < size <= CHUNK_SIZE
    return size


def _push_path(content: bytes) -> object:
    found = parse_push_path(text(content))
    if found is not None:
        assert parse_push_path(push_path(*found)) == found
    return found


def _answer_head(content: bytes) -> object:
    if not content.endswith(b"\r\n\r\n"):
        raise ProtocolError("not one head")
    head = parse_answer(content)
    assert 100 <= head.status < 600
    assert head.length is None or head.length >= 0
    assert not (head.is_chunked and head.length is not None)
    return head


def _bitmap(content: bytes) -> object:
    bitmap = Bitmap.parse(content, 20)
    assert Bitmap.parse(bitmap.to_bytes(), 20).to_bytes() == bitmap.to_bytes()
    return bitmap


_SIGNER: Final = GrantSigner(new_signing_key())
_VERIFIER: Final = GrantVerifier(_SIGNER.public_keys)
_ONE, _TWO = digest_of(b"one"), digest_of(b"two")
_GRANT: Final = Grant("org", (GrantedMount("/app/model", _ONE, "hf://org/model"),), NOW + 1000)


def _grant(content: bytes) -> object:
    grant = _VERIFIER.verify(text(content), now=NOW)
    assert grant == _GRANT, "a grant that nobody signed"
    return grant


def _nested(depth: int) -> bytes:
    """A token whose head is lists in lists."""
    return base64.urlsafe_b64encode(b'{"kid":' + b"[" * depth + b"]" * depth + b"}").rstrip(b"=") + b".e30.AA"


def _secret(read: Callable[[Secret], object]) -> Callable[[bytes], object]:
    return lambda content: read(Secret("name", text(content)))


_SMALL = FileLayout(_ONE, 3, (_ONE,))
_LARGE = FileLayout.of(CHUNK_SIZE + 1, (_ONE, _TWO))
_PACKED = FileLayout(_TWO, 3, (_TWO,), Slice(_ONE, 100, 7))
_HELD = held_of({"a/b.bin": _SMALL, "c": _LARGE, "d": _PACKED})
_LISTING_ROOT = b'{"pages":["%b"],"schema":"bdn.listing.v2","whole":true}' % str(_ONE).encode()
_LISTING_PAGE = b'[["a/b.bin",3,"key","sha256","00","11"],["c",4,"other key",null,null,null]]'
_LISTING = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
    b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    b"<Contents><Key>a+b%2Bc</Key><ETag>&quot;x&quot;</ETag><Size>12</Size></Contents></ListBucketResult>"
)
_STAGE = (
    b'{"id":"stg_1","job_id":"j","organisation":"o","grant":"g","state":"READY","created_at":1.5,'
    b'"mounts":[{"mount_location":"/m","manifest":"%b","source":"hf://a/b"}]}' % str(_ONE).encode()
)
_HEARTBEAT = (
    b'{"node":"n","cluster":"c","boot_id":"b","roles":["node"],"advertise":null,"version":"1","tiers":'
    b'{"node":{"budget":1,"committed":1,"reserved":0,"leased":0}},"epoch":3}'
)
_WEIGHTS = b'{"weights":[{"source":"hf://o/m@main","mount_location":"/m","allow_patterns":["*.json"]}]}'
_KEYS = b'{"aws_access_key_id":"a","aws_secret_access_key":"b","aws_region":null}'
_ACCOUNT = (
    b'{"type":"service_account","client_email":"a@b","private_key":"k","private_key_id":"i","token_uri":"https://t"}'
)
_REQUEST = b"GET /chunks/b3:00 HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\nAuthorization: Bearer x\r\n\r\n"
_PUT = b"PUT /pushes/x HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nExpect: 100-continue\r\n\r\n"
_ANSWER = b'HTTP/1.1 206 Partial\r\nContent-Length: 12\r\nETag: "x"\r\nConnection: keep-alive\r\n\r\n'
_CHUNKED = b"HTTP/1.0 200\r\nTransfer-Encoding: chunked\r\n\r\n"


def _model(kind: type[Mirror | Heartbeat | StageRecord | MirrorRequestBody]) -> Callable[[bytes], object]:
    return kind.model_validate_json


TARGETS: Final = {
    target.name: target
    for target in (
        Target("source", _source, (BdnError,),
            (b"hf://o/m@refs/pr/1", b"s3://bucket/a/b", b"r2://acc.eu.bucket/p", b"gs://b")),
        Target("path", _path, (UnsafePathError,), (b"a/b/c.bin", b"./a//b", b"../x", b"/abs", "é/ü".encode())),
        Target("mount", _mount, (InvalidMountError,), (b"/app/model", b"/a/../b", b"//x//y/", b"rel")),
        Target("pattern", _patterns, (ValueError, BdnError),
            (b"**/*.json\na/b.json", b"a[!b-d]?*\nabc", b"x/**/y/\nx/1/2/y/z", b"[]\n]")),
        Target("root", _root, (MalformedDocumentError,), (_HELD.root.content,)),
        Target("page", _page, (MalformedDocumentError,), tuple(_HELD.pages)),
        Target("listing", ListingRoot.parse, (MalformedDocumentError,), (_LISTING_ROOT,)),
        Target("listing-page", lambda content: list(listed_in([content])), (MalformedDocumentError,), (_LISTING_PAGE,)),
        Target("range", _range, (UnsatisfiableRangeError,),
            (b"bytes=0-9", b"bytes=-5", b"bytes=7-", b"bytes=0-1,3-4", b"bytes=990-2000")),
        Target("content-range", _content_range, (), (b"bytes 0-9/100", b"bytes */100", b"bytes 5-4/9")),
        Target("size", _size, (ValueError,), (b"500GB", b"64MiB", b"1.5 TB", b"12")),
        Target("retry-after", _retry_after, (), (b"r|120", b"r|Wed, 21 Oct 2026 07:28:00 GMT", b'x|"api";r=0;t=55')),
        Target("request-head", _request_head, (HeadRefusedError,), (_REQUEST, b"HEAD /x HTTP/1.0\r\n\r\n")),
        Target("body-size", _body_size, (HeadRefusedError,), (_PUT, _PUT.replace(b"Content-Length", b"Transfer-Encoding"))),
        Target("push-path", _push_path, (),
            (f"/pushes/mir_{'0a' * 12}/chunks/{_ONE}?x=1".encode(), b"/pushes/mir_0/chunks/b3%3Aaa")),
        Target("answer-head", _answer_head, (ProtocolError,), (_ANSWER, _CHUNKED)),
        Target("chunk-path", lambda content: parse_chunk_path(text(content)), (),
            (f"/chunks/{_ONE}?x=1".encode(), b"/chunks/b3%3Aaa")),
        Target("digest", lambda content: Digest.parse(text(content)), (ValueError,), (str(_ONE).encode(), b"b3:XX")),
        Target("bitmap", _bitmap, (), (Bitmap(20).to_bytes(),)),
        Target("grant", _grant, (GrantInvalidError,),
            (_SIGNER.sign(_GRANT).encode(), b"a.b.c", b"eyJhbGciOiJub25lIn0.e30.", _nested(10), _nested(30_000))),
        Target("hugging-face-token", _secret(hugging_face_token), (SecretMalformedError,), (b"hf_abc\n", b"")),
        Target("s3-keys", _secret(s3_credentials), (SecretMalformedError,), (_KEYS,)),
        Target("service-account", _secret(service_account_key), (SecretMalformedError,), (_ACCOUNT,)),
        Target("s3-listing", read_page, (NotAListingError,), (_LISTING,)),
        Target("stage-record", _model(StageRecord), (ValueError,), (_STAGE,)),
        Target("heartbeat", _model(Heartbeat), (ValueError,), (_HEARTBEAT,)),
        Target("weights", _model(MirrorRequestBody), (ValueError,), (_WEIGHTS,)),
        Target("error", lambda content: str(error_from(500, content)), (),
            (b'{"error":{"code":"NOT_FOUND","message":"m","retryable":false,"details":{}}}',)),
        Target("egress", lambda content: EgressPolicy.parse(text(content)), (ValueError, BdnError),
            (b"127.0.0.1, *.x.org", b"10.0.0.0/8", b"[::1]", b"0x7f.1")),
    )
}  # fmt: skip
