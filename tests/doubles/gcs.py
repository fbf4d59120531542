"""A local GCS that is as strict as the real one where emulators are not: pages, generations, ranges, access, encodings.

with GcsServer() as server:
    bucket = server.bucket("weights")
    bucket.put({"model/config.json": b"{}"})
    # read from server.url with server.account's key
"""

import json
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import Self
from urllib.parse import parse_qs, unquote

from tests.doubles.faults import Fault, Script
from tests.doubles.gcs_accounts import TokenEndpoint
from tests.doubles.gcs_objects import GcsBucket, StoredObject
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog

_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_MEDIA = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_LISTED = re.compile(r"items\(([a-zA-Z0-9,]+)\)")
_PARAMETERS = {"prefix", "maxResults", "pageToken", "fields"}


class GcsServer:
    """The JSON API (``gcs``) and the token endpoint (``oauth``), each on a free port of the loopback."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.log = RequestLog()
        self.script = Script()
        self.tokens = TokenEndpoint(clock)
        self.account = self.tokens.account("reader")
        self.stranger = self.tokens.account("stranger")
        self.page_limit = 1000  # GCS may give less than it was asked for
        self._buckets: dict[str, GcsBucket] = {}
        self._api = Origin("gcs", self._respond, log=self.log, script=self.script)
        self._oauth = Origin("oauth", self.tokens.respond, log=self.log, script=self.script)
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self._running.enter_context(self._api)
        self._running.enter_context(self._oauth)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @property
    def url(self) -> str:
        return self._api.url

    @property
    def token_url(self) -> str:
        return f"{self._oauth.url}/token"

    def bucket(self, name: str, *, public: bool = False) -> GcsBucket:
        """A new, empty bucket that anybody may read (``public``) or only the account."""
        self._buckets[name] = GcsBucket(name, None if public else frozenset({self.account.email}))
        return self._buckets[name]

    def fail(self, fault: Fault, path: str = "", *, times: int | None = 1, skip: int = 0) -> None:
        """Order a failure of the JSON API; see :class:`tests.doubles.faults.Script`."""
        self.script.add(fault, path, origin="gcs", times=times, skip=skip)

    def fail_tokens(self, fault: Fault, *, times: int | None = 1) -> None:
        """Order a failure of the token endpoint."""
        self.script.add(fault, origin="oauth", times=times)

    def _respond(self, request: Request) -> Answer:
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
