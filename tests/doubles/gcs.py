"""A local GCS that is as strict as the real one where emulators are not: pages, generations, ranges, access, encodings.

with GcsServer() as server:
    bucket = server.bucket("weights")
    bucket.put({"model/config.json": b"{}"})
    # read from server.url with server.account's key
"""

import gzip
import hashlib
import json
import re
import time
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Self
from urllib.parse import parse_qs, unquote

import google_crc32c

from tests.doubles.faults import Fault
from tests.doubles.gcs_accounts import TokenEndpoint
from tests.doubles.goog4 import google_refusal_of
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.object_server import Objects
from tests.doubles.s3_errors import s3_error

_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_MEDIA = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_LISTED = re.compile(r"items\(([a-zA-Z0-9,]+)\)")
_PARAMETERS = {"prefix", "maxResults", "pageToken", "fields"}
_GENERATIONS = count(1_700_000_000_000_000)


@dataclass(frozen=True)
class StoredObject:
    """``content`` is as stored: compressed where ``encoding`` says so. ``composite`` ones have no MD5."""

    name: str
    content: bytes
    generation: int
    encoding: str | None = None
    composite: bool = False

    @cached_property
    def hashes(self) -> dict[str, str]:
        crc32c = b64encode(google_crc32c.value(self.content).to_bytes(4, "big")).decode()
        md5 = b64encode(hashlib.md5(self.content, usedforsecurity=False).digest()).decode()
        return {"crc32c": crc32c} if self.composite else {"crc32c": crc32c, "md5Hash": md5}

    def resource(self, bucket: str) -> dict[str, object]:
        """The JSON API's description."""
        encoding = {"contentEncoding": self.encoding} if self.encoding else {}
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.content)),
            "etag": f"C{self.generation}=",
            **self.hashes,
            **encoding,
        }

    @property
    def unpacked(self) -> bytes:
        return gzip.decompress(self.content) if self.encoding == "gzip" else self.content


class GcsBucket:
    """A bucket that a test fills behind the server's back. ``readers`` None is everybody."""

    def __init__(self, name: str, readers: frozenset[str] | None) -> None:
        self.name = name
        self.readers = readers
        self._objects: dict[str, StoredObject] = {}
        self._names: list[tuple[bytes, str]] | None = []  # sorted; None until somebody asks

    def put(self, objects: Mapping[str, bytes], *, encoding: str | None = None, composite: bool = False) -> None:
        """Any name is taken as it is. Each object becomes a new generation."""
        for name, content in objects.items():
            self._objects[name] = StoredObject(name, content, next(_GENERATIONS), encoding, composite)
        self._names = None

    def delete(self, *names: str) -> None:
        for name in names:
            del self._objects[name]
        self._names = None

    def get(self, name: str) -> StoredObject | None:
        return self._objects.get(name)

    def after(self, prefix: str, last: str | None) -> Iterator[StoredObject]:
        """Objects whose names begin with ``prefix`` and lie behind ``last``, in the order of their UTF-8 bytes."""
        if self._names is None:
            self._names = sorted((name.encode("utf-8", "surrogatepass"), name) for name in self._objects)
        beginning = prefix.encode("utf-8", "surrogatepass")
        start = beginning if last is None else max(beginning, last.encode("utf-8", "surrogatepass") + b"\0")
        names = self._names
        for index in range(bisect_left(names, (start, "")), len(names)):
            if not names[index][0].startswith(beginning):
                return
            yield self._objects[names[index][1]]


class GcsServer(Origin):
    """The JSON API (``gcs``) and the token endpoint (``oauth``), each on a free port of the loopback."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__("gcs", self._respond)
        self.tokens = TokenEndpoint(clock)
        self.account = self.tokens.account("reader")
        self.stranger = self.tokens.account("stranger")
        self.page_limit = 1000  # GCS may give less than it was asked for
        self._buckets: dict[str, GcsBucket] = {}
        self._written: dict[str, Objects] = {}
        self._oauth = Origin("oauth", self.tokens.respond, log=self.log, script=self.script)

    def __enter__(self) -> Self:
        self._oauth.__enter__()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._oauth.__exit__()

    @property
    def token_url(self) -> str:
        return f"{self._oauth.url}/token"

    def bucket(self, name: str, *, public: bool = False) -> GcsBucket:
        """A new, empty bucket that anybody may read (``public``) or only the account."""
        self._buckets[name] = GcsBucket(name, None if public else frozenset({self.account.email}))
        return self._buckets[name]

    def written_bucket(self, name: str) -> Objects:
        """A new, empty bucket that the account writes through the XML API."""
        self._written[name] = Objects(name, "x-goog-", self.now)
        return self._written[name]

    def fail_tokens(self, fault: Fault, *, times: int | None = 1) -> None:
        """Order a failure of the token endpoint."""
        self.script.add(fault, origin="oauth", times=times)

    def _respond(self, request: Request) -> Answer:
        if not request.url.path.startswith(("/storage/", "/download/")):
            return self._write(request)
        listing, media = _LIST.fullmatch(request.url.path), _MEDIA.fullmatch(request.url.path)
        found = listing or media
        if request.method != "GET" or found is None:
            return gcs_error(404, "notFound")
        bucket = self._buckets.get(unquote(found[1]))
        if bucket is None:
            return gcs_error(404, "notFound", "The specified bucket does not exist.")
        refusal = self._refusal(request, bucket)
        if refusal:
            return refusal
        query = {name: values[0] for name, values in parse_qs(request.url.query, strict_parsing=True).items()}
        return self._list(bucket, query) if listing else _media(bucket, unquote(found[2]), query, request)

    def _write(self, request: Request) -> Answer:
        if any(name.startswith("x-amz-") for name in request.headers):
            return s3_error(400, "ExcessHeaderValues")
        if refusal := google_refusal_of(request, self.account, self.clock()):
            return s3_error(403, refusal)
        _, name, *rest = request.url.path.split("/", 2)
        bucket = self._written.get(unquote(name))
        return bucket.respond(request, unquote("".join(rest))) if bucket else s3_error(404, "NoSuchBucket")

    def _refusal(self, request: Request, bucket: GcsBucket) -> Answer | None:
        """Strangers are told apart as GCS does: 401 without a token or with a bad one, 403 with somebody else's."""
        method, _, token = request.headers.get("authorization", "").partition(" ")
        if not method:
            return None if bucket.readers is None else gcs_error(401, "required")
        owner = self.tokens.owner_of(token) if method == "Bearer" else None
        if owner is None:
            return gcs_error(401, "authError", "Invalid Credentials")
        return None if bucket.readers is None or owner in bucket.readers else gcs_error(403, "forbidden")

    def _list(self, bucket: GcsBucket, query: dict[str, str]) -> Answer:
        masked = _LISTED.search(query.get("fields", ""))
        wanted = int(query.get("maxResults", "1000"))
        if not query.keys() <= _PARAMETERS or masked is None or not 1 <= wanted <= 1000:
            return gcs_error(400, "invalid")
        last = urlsafe_b64decode(query["pageToken"]).decode() if "pageToken" in query else None
        size = min(wanted, self.page_limit)
        entries = list(islice(bucket.after(query.get("prefix", ""), last), size + 1))
        page: dict[str, object] = {}
        names = masked[1].split(",")
        resources = [entry.resource(bucket.name) for entry in entries[:size]]
        if resources:
            page["items"] = [{name: item[name] for name in names if name in item} for item in resources]
        if len(entries) > size and "nextPageToken" in query["fields"]:
            page["nextPageToken"] = urlsafe_b64encode(entries[size - 1].name.encode()).decode()
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(page).encode())


def _media(bucket: GcsBucket, name: str, query: dict[str, str], request: Request) -> Answer:
    found = bucket.get(name)
    if query.get("alt") != "media":
        return gcs_error(400, "invalid")
    if found is None or query.get("generation", str(found.generation)) != str(found.generation):
        return gcs_error(404, "notFound", f"No such object: {bucket.name}/{name}")
    if query.get("ifGenerationMatch", str(found.generation)) != str(found.generation):
        return gcs_error(412, "conditionNotMet")
    headers = _media_headers(found)
    if found.encoding == "gzip" and "gzip" not in request.headers.get("accept-encoding", ""):
        # "Decompressive transcoding": unpacked on the way, without ranges and with the hashes of the stored bytes.
        return Answer(200, {**headers, "Warning": "214 UploadServer gunzipped"}, found.unpacked)
    encoding = {"Content-Encoding": found.encoding} if found.encoding else {}
    return Answer(200, {**headers, **encoding}, found.content, ranged=True)


def _media_headers(found: StoredObject) -> dict[str, str]:
    hashes = {"crc32c": "crc32c", "md5Hash": "md5"}
    return {
        "Content-Type": "application/octet-stream",
        "ETag": f"C{found.generation}=",
        "x-goog-generation": str(found.generation),
        "x-goog-hash": ",".join(f"{hashes[kind]}={value}" for kind, value in found.hashes.items()),
        "x-goog-stored-content-length": str(len(found.content)),
    }


def gcs_error(status: int, reason: str, message: str = "double") -> Answer:
    errors = [{"message": message, "domain": "global", "reason": reason}]
    document = {"error": {"code": status, "message": message, "errors": errors}}
    return Answer(status, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(document).encode())
