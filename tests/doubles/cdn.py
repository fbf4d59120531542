"""The hub's second origin: content by digest, for those who hold a signed link and send no credentials."""

import hmac
import time
from urllib.parse import parse_qs, quote

from tests.doubles.http_origin import Answer, Request
from tests.doubles.hub_repository import HubFile

LINK_SECONDS = 3600


class Cdn:
    def __init__(self) -> None:
        self.url = ""
        self._contents: dict[str, HubFile] = {}
        self._key = b"first"

    def link(self, file: HubFile) -> str:
        """An address that is good for an hour."""
        path = f"/repos/{file.sha256[:2]}/{file.sha256}"
        self._contents[path] = file
        expires = str(int(time.time()) + LINK_SECONDS)
        name = quote(file.path.rpartition("/")[2], safe="")
        return f"{self.url}{path}?filename={name}&Expires={expires}&Signature={self._sign(path, expires)}"

    def expire_links(self) -> None:
        self._key += b"+"

    def respond(self, request: Request) -> Answer:
        if "authorization" in request.headers:
            # S3 and CloudFront refuse two ways of signing at once; here it proves that a token leaked.
            return Answer(400, {}, b"Only one auth mechanism allowed")
        query = parse_qs(request.url.query)
        expires, signature = query.get("Expires", ["0"])[0], query.get("Signature", [""])[0]
        if not hmac.compare_digest(signature, self._sign(request.url.path, expires)) or int(expires) < time.time():
            return Answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
        file = self._contents[request.url.path]
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"cdn-{file.oid}"'}
        return Answer(200, headers, file.content, ranged=True)

    def _sign(self, path: str, expires: str) -> str:
        return hmac.digest(self._key, f"{path} {expires}".encode(), "sha256").hex()
