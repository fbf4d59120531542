"""A local S3: moto's behaviour behind real signatures, private buckets, a log of requests and scripted failures.

    with S3Server() as server:
        bucket = server.bucket("weights")
        bucket.put({"model/config.json": b"{}"})
        # read from server.url with server.account's keys

moto keeps one account per process, so two servers of one process share their buckets; choose other names.
"""

import re
from collections.abc import Mapping
from threading import Lock
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.test import EnvironBuilder, run_wsgi_app

from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.s3_errors import s3_error
from tests.doubles.sigv4 import Account, refusal_of, region_of

# Access is decided here; moto gets a signature of the right shape, which is all that it looks at.
_ADMITTED = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"

_MOTO = Lock()  # a request that reads an object while another one replaces it would fail in a way that is only moto's


class S3Bucket:
    """A bucket that a test fills behind the server's back, so that filling is neither logged nor slow.

    Requests that are signed for another ``region`` are sent there; None takes any.
    """

    def __init__(self, name: str, *, public: bool = False, region: str | None = None) -> None:
        self.name = name
        self.public = public
        self.region = region
        self.heads: dict[str, dict[str, str]] = {}

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Any key is taken as it is, also those that HTTP clients would normalise."""
        for key, content in objects.items():
            with _MOTO:
                s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(self.name, key, content)

    def state(self, key: str, headers: Mapping[str, str]) -> None:
        """Answers for the object say this, too; checksums as S3 does: where asked for, and not with a range."""
        self.heads[key] = dict(headers)

    def keep_versions(self) -> None:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_bucket_versioning(self.name, "Enabled")

    def delete(self, *keys: str) -> None:
        for key in keys:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].delete_object(self.name, key)


class S3Server(Origin):
    """Path-style S3 on a free port of the loopback, from ``with`` until its end, which drops its buckets."""

    def __init__(self) -> None:
        super().__init__("s3", self._respond)
        self.account = Account("AKIADOUBLE", "double/secret+key")
        self.accounts = {self.account.access_key_id: self.account}
        self.page_limit = 1000  # keys on a page of a listing, however many are asked for
        self._application = DomainDispatcherApplication(create_backend_app)
        self.strangers: set[str] = set()  # access keys whose owners may read no bucket of ours
        self._buckets: dict[str, S3Bucket] = {}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        for name in self._buckets.keys() & backend.buckets.keys():
            del backend.buckets[name]
            s3_backends.bucket_accounts.pop(name, None)  # names are known to all accounts of the process

    def bucket(self, name: str, *, public: bool = False, region: str | None = None) -> S3Bucket:
        """A new, empty bucket that anybody may read (``public``) or only the account."""
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(name, "us-east-1")
        bucket = self._buckets[name] = S3Bucket(name, public=public, region=region)
        return bucket

    def _respond(self, request: Request) -> Answer:
        _, name, *rest = request.url.path.split("/", 2)
        bucket = self._buckets.get(name)
        if bucket and bucket.region and region_of(request) not in (bucket.region, None):
            return _elsewhere(request, bucket.region)
        refusal = refusal_of(request, self.accounts)
        if refusal is None and not self._open_to_all(request, bucket):
            refusal = "AccessDenied"
        if refusal == "" and bucket and self._is_stranger(request):
            refusal = "AccessDenied"
        if refusal:
            return s3_error(403, refusal)
        with _MOTO:
            chunks, status, headers = run_wsgi_app(self._application, _environ(request, self.page_limit), buffered=True)
        kept = {name: value for name, value in headers.items() if name.lower() not in _HOP}
        size = int(headers["Content-Length"]) if request.method == "HEAD" and "Content-Length" in headers else None
        if bucket and status.startswith("2"):
            kept |= _stated(request, bucket.heads.get(unquote("".join(rest)), {}))
        return Answer(int(status.split()[0]), kept, b"".join(chunks), size=size)

    def _is_stranger(self, request: Request) -> bool:
        return any(key in f"{request.target} {request.headers.get('authorization', '')}" for key in self.strangers)

    @staticmethod
    def _open_to_all(request: Request, bucket: S3Bucket | None) -> bool:
        # Like S3, the double tells everybody that a bucket does not exist.
        return request.method in ("GET", "HEAD") and (bucket is None or bucket.public)


_HOP = ("connection", "content-length", "date", "server", "transfer-encoding")


def _elsewhere(request: Request, region: str) -> Answer:
    body = (
        "<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region is wrong; expecting another</Message>"
        f"<Region>{region}</Region></Error>"
    )
    headers = {"Content-Type": "application/xml", "x-amz-bucket-region": region}
    return Answer(400, headers, b"" if request.method == "HEAD" else body.encode())


def _stated(request: Request, headers: Mapping[str, str]) -> dict[str, str]:
    checksums = request.headers.get("x-amz-checksum-mode") == "ENABLED" and "range" not in request.headers
    return {name: value for name, value in headers.items() if checksums or not name.startswith("x-amz-checksum-")}


def _environ(request: Request, page_limit: int) -> dict[str, Any]:
    """WSGI (PEP 3333), with the raw target as werkzeug's own server passes it: moto reads keys from there."""
    headers = {**request.headers, "authorization": _ADMITTED}
    built = EnvironBuilder(method=request.method, headers=list(headers.items()), data=request.body)
    query = re.sub(r"(?<=max-keys=)\d+", lambda asked: str(min(int(asked[0]), page_limit)), request.url.query)
    path = unquote_to_bytes(request.url.path).decode("latin-1")
    raw = {
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "REQUEST_URI": request.target,
        "RAW_URI": request.target,
    }
    return built.get_environ() | raw
