"""Objects that are written: S3's interface with its own names for headers, or with Google's (the XML API).

with ObjectServer() as server:
    objects = server.bucket("store")
    # BDN_STORE=s3://store at server.url with server.account's keys

As strict as the real ones; a server that does less says so in ``checks`` and ``leaves_what_is_there``. Written from the API
references of both ("PutObject", "CopyObject", "ListObjectsV2"; "XML API: headers").
"""

import time
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from hashlib import md5
from threading import RLock
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

import google_crc32c

from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.s3_errors import s3_error
from tests.doubles.sigv4 import Account, refusal_of

ALL_CHECKS = frozenset({"crc32c", "md5"})


@dataclass(frozen=True, slots=True)
class WrittenObject:
    content: bytes
    written_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    states_crc32c: bool = True

    @property
    def etag(self) -> str:
        return f'"{md5(self.content, usedforsecurity=False).hexdigest()}"'

    @property
    def crc32c(self) -> str:
        return b64encode(google_crc32c.value(self.content).to_bytes(4, "big")).decode()


class Objects:
    """One bucket. ``vendor`` is ``x-amz-`` or ``x-goog-``; ``clock`` is the server's. With ``spoils`` what comes has changed on its way."""

    def __init__(self, name: str, vendor: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.held: dict[str, WrittenObject] = {}
        self.checks = ALL_CHECKS
        self.leaves_what_is_there = True
        self.page_limit = 1000
        self.spoils = False
        self._vendor = vendor
        self._clock = clock
        self._lock = RLock()

    def overwrite(self, key: str, content: bytes) -> None:
        """Behind everybody's back, as with another tool."""
        with self._lock:
            self.held[key] = WrittenObject(content, self._clock())

    def respond(self, request: Request, key: str) -> Answer:
        with self._lock:
            match request.method:
                case "GET" | "HEAD" if key:
                    return self._read(request, key)
                case "GET":
                    return self._list(parse_qs(request.url.query, keep_blank_values=True))
                case "PUT":
                    source = request.headers.get(f"{self._vendor}copy-source")
                    return self._copy(request, key, unquote(source)) if source else self._put(request, key)
                case "DELETE":
                    self.held.pop(key, None)
                    return Answer(204)
                case _:
                    return s3_error(405, "MethodNotAllowed")

    def _read(self, request: Request, key: str) -> Answer:
        found = self.held.get(key)
        if found is None:
            return s3_error(404, "NoSuchKey")
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.written_at, usegmt=True), **found.metadata}
        if self._vendor == "x-goog-":
            headers["x-goog-hash"] = f"crc32c={found.crc32c},md5={b64encode(bytes.fromhex(found.etag[1:-1])).decode()}"
        elif request.headers.get("x-amz-checksum-mode") == "ENABLED" and found.states_crc32c:
            headers["x-amz-checksum-crc32c"] = found.crc32c
        return Answer(200, headers, found.content, ranged=True)

    def _put(self, request: Request, key: str) -> Answer:
        if "content-length" not in request.headers:
            return s3_error(411, "MissingContentLength")
        content = request.body[:-1] + b"!" if self.spoils else request.body
        written = WrittenObject(content, self._clock(), self._metadata(request), "crc32c" in self.checks)
        if "crc32c" in self.checks and not self._is_right(request, written.crc32c):
            return s3_error(400, "BadDigest")
        given_md5 = request.headers.get("content-md5")
        if "md5" in self.checks and given_md5 not in (None, b64encode(bytes.fromhex(written.etag[1:-1])).decode()):
            return s3_error(400, "BadDigest")
        absent = ("if-none-match", "*") if self._vendor == "x-amz-" else ("x-goog-if-generation-match", "0")
        if self.leaves_what_is_there and request.headers.get(absent[0]) == absent[1] and key in self.held:
            return s3_error(412, "PreconditionFailed")
        self.held[key] = written
        return Answer(200, {"ETag": written.etag})

    def _is_right(self, request: Request, crc32c: str) -> bool:
        name, before = ("x-amz-checksum-crc32c", "") if self._vendor == "x-amz-" else ("x-goog-hash", "crc32c=")
        return request.headers.get(name) in (None, before + crc32c)

    def _copy(self, request: Request, key: str, source: str) -> Answer:
        bucket, _, name = source.removeprefix("/").partition("/")
        found = self.held.get(name) if bucket == self.name else None
        if found is None:
            return s3_error(404, "NoSuchKey")
        if request.headers.get(f"{self._vendor}metadata-directive") != "REPLACE" and name == key:
            return s3_error(400, "InvalidRequest")
        self.held[key] = WrittenObject(found.content, self._clock(), self._metadata(request), found.states_crc32c)
        body = f"<CopyObjectResult><ETag>{found.etag}</ETag></CopyObjectResult>"
        return Answer(200, {"Content-Type": "application/xml"}, body.encode())

    def _metadata(self, request: Request) -> dict[str, str]:
        begin = f"{self._vendor}meta-"
        return {name: value for name, value in request.headers.items() if name.startswith(begin)}

    def _list(self, query: Mapping[str, list[str]]) -> Answer:
        if query.get("list-type") != ["2"] or query.get("encoding-type") != ["url"]:
            return s3_error(400, "InvalidArgument")
        prefix, size = query.get("prefix", [""])[0], min(int(query["max-keys"][0]), self.page_limit)
        after = urlsafe_b64decode(query.get("continuation-token", [""])[0]).decode()
        names = self.names(prefix, after)
        shown = names[:size]
        entries = "".join(map(self.entry, shown))
        goes_on = len(names) > size
        last = urlsafe_b64encode("".join(shown[-1:]).encode()).decode()
        token = f"<NextContinuationToken>{last}</NextContinuationToken>"
        body = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
            f"<IsTruncated>{str(goes_on).lower()}</IsTruncated>{token if goes_on else ''}{entries}</ListBucketResult>"
        )
        return Answer(200, {"Content-Type": "application/xml"}, body.encode())

    def names(self, prefix: str, after: str) -> Sequence[str]:
        """What is there behind a name, in order; no more than a listing shows, and one."""
        return sorted(name for name in self.held if name.startswith(prefix) and name > after)

    def entry(self, name: str) -> str:
        """What a listing says of an object."""
        found = self.held[name]
        written = datetime.fromtimestamp(int(found.written_at), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<Contents><Key>{quote(name)}</Key><LastModified>{written}</LastModified><ETag>{escape(found.etag)}</ETag>"
            f"<Size>{len(found.content)}</Size></Contents>"
        )


class ObjectServer(Origin):
    """Path-style S3 on a free port of the loopback, from ``with`` until its end, for one account."""

    def __init__(self) -> None:
        super().__init__("objects", self._respond)
        self.account = Account("AKIAOBJECTS", "objects/secret+key")
        self.buckets: dict[str, Objects] = {}
        self.signatures_clock: Callable[[], float] = time.time  # whether a signature is still good

    def bucket(self, name: str) -> Objects:
        """A new, empty one."""
        self.buckets[name] = Objects(name, "x-amz-", self.now)
        return self.buckets[name]

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        """Of the objects whose keys begin so."""
        return {key: len(one.content) for key, one in list(self.buckets[bucket].held.items()) if key.startswith(prefix)}

    def read(self, bucket: str, key: str) -> bytes | None:
        """The object's bytes, behind everybody's back; None where there is none."""
        found = self.buckets[bucket].held.get(key)
        return None if found is None else found.content

    def overwrite(self, bucket: str, key: str, content: bytes | None) -> None:
        """Put these there, or nothing."""
        if content is None:
            self.buckets[bucket].held.pop(key, None)
        else:
            self.buckets[bucket].overwrite(key, content)

    def _respond(self, request: Request) -> Answer:
        now = datetime.fromtimestamp(self.signatures_clock(), UTC)
        refusal = refusal_of(request, {self.account.access_key_id: self.account}, now)
        if refusal != "":
            return s3_error(403, refusal or "AccessDenied")
        _, name, *rest = request.url.path.split("/", 2)
        bucket = self.buckets.get(name)
        if bucket is None:
            return s3_error(404, "NoSuchBucket")
        return bucket.respond(request, unquote("".join(rest)))
