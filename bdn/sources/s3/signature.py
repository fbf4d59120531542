"""AWS Signature Version 4 for the one request that is signed very often: GET of an object, in its address.

botocore takes half a millisecond for each, and a million small files are a normal source. Rules: "Authenticating Requests:
Using Query Parameters (AWS Signature Version 4)" in the S3 API reference.
"""

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import quote, urlsplit

from bdn.net.http1.connection import host_of, split_address
from bdn.sources.settings import S3Credentials

# S3 refuses an x-amz-* header that is sent beside a signature and is not part of it, so this one is, and has to be sent.
CHECKSUM_MODE: Final = ("x-amz-checksum-mode", "ENABLED")
_SIGNED_HEADERS: Final = f"host;{CHECKSUM_MODE[0]}"


@dataclass(frozen=True, slots=True)
class GetSigner:
    """Signs with one set of keys as of one second; everything but the object is prepared when it is made.

    ``base`` is the bucket's address with a final slash, ``path`` its path, ``expires_at`` is in seconds since the epoch.
    """

    credentials: S3Credentials = field(repr=False)
    base: str
    signed_at: int
    expires_at: float
    _path: str
    _key: bytes = field(repr=False)
    _query: str = field(repr=False)
    _headers: str = field(repr=False)
    _scope: str = field(repr=False)

    @classmethod
    def of(cls, base: str, region: str, credentials: S3Credentials, signed_at: int, seconds: int) -> Self:
        """For addresses that are good for ``seconds``, or until the keys end."""
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(signed_at))
        scope = (moment[:8], region, "s3", "aws4_request")
        key = f"AWS4{credentials.secret_access_key}".encode()
        for part in scope:
            key = hmac.digest(key, part.encode(), "sha256")
        query = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": "/".join((credentials.access_key_id, *scope)),
            "X-Amz-Date": moment,
            "X-Amz-Expires": str(seconds),
            "X-Amz-Security-Token": credentials.session_token,
            "X-Amz-SignedHeaders": _SIGNED_HEADERS,
        }
        parts = urlsplit(base)
        ends = signed_at + float(seconds)
        return cls(
            credentials,
            base,
            signed_at,
            ends if credentials.expires_at is None else min(ends, credentials.expires_at),
            parts.path,
            key,
            "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items() if value is not None),
            f"host:{host_of(split_address(base)[0])}\n{':'.join(CHECKSUM_MODE)}\n\n{_SIGNED_HEADERS}\nUNSIGNED-PAYLOAD",
            f"AWS4-HMAC-SHA256\n{moment}\n{'/'.join(scope)}\n",
        )

    def address(self, key: str, version_id: str | None = None) -> str:
        """Where the object can be read with ``CHECKSUM_MODE`` among the headers."""
        # The query is signed in the order of its names, and "versionId" comes behind all of the others.
        query = self._query if version_id is None else f"{self._query}&versionId={quote(version_id, safe='')}"
        name = quote(key)
        request = f"GET\n{self._path}{name}\n{query}\n{self._headers}"
        text = self._scope + hashlib.sha256(request.encode()).hexdigest()
        signature = hmac.digest(self._key, text.encode(), "sha256").hex()
        return f"{self.base}{name}?{query}&X-Amz-Signature={signature}"


def plain_address(base: str, key: str, version_id: str | None = None) -> str:
    """The same without a signature, for what everybody may read."""
    version = "" if version_id is None else f"?versionId={quote(version_id, safe='')}"
    return f"{base}{quote(key)}{version}"
