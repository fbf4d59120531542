"""Presigned addresses (AWS Signature Version 4, Google's V4 variant) for sources and for all requests to bucket stores.

botocore needs 0.5 ms for each, and a million small files are a normal source. Rules: "Authenticating Requests: Using
Query Parameters (AWS Signature Version 4)" in the S3 API reference, "Signatures" of Cloud Storage's "V4 signing
process".
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self
from urllib.parse import quote, urlsplit

from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256

from bdn.net.http1.connection import host_of, split_address
from bdn.sources.settings import S3Credentials

# S3 refuses an unsigned x-amz-* header beside a signature, so this header is signed and must be sent.
CHECKSUM_MODE: Final = ("x-amz-checksum-mode", "ENABLED")
REQUESTER_PAYS: Final = ("x-amz-request-payer", "requester")
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_SEPARATOR: Final = "%3B"  # between the names of headers, in an address


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope of a signature; the names of its parameters begin with ``vendor``."""

    algorithm: str
    vendor: str
    signed_at: int
    region: str
    service: str
    end: str

    @property
    def moment(self) -> str:
        return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.signed_at))

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.moment[:8], self.region, self.service, self.end)

    @property
    def opening(self) -> str:
        return f"{self.algorithm}\n{self.moment}\n{'/'.join(self.parts)}\n"

    def query(self, name: str, seconds: int, token: str | None) -> str:
        """The parameters of the signature, without SignedHeaders and Signature."""
        query = {
            "Algorithm": self.algorithm,
            "Credential": "/".join((name, *self.parts)),
            "Date": self.moment,
            "Expires": str(seconds),
            "Security-Token": token,
        }
        given = {f"{self.vendor}-{name}": value for name, value in query.items() if value is not None}
        return "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items())


@dataclass(frozen=True, slots=True)
class AddressSigner:
    """Signs with one set of keys as of one second; all that does not depend on the request is prepared in advance.

    ``base`` is the bucket's address with a final slash, ``expires_at`` is in seconds since the epoch.
    """

    base: str
    signed_at: int
    expires_at: float
    _scope: Scope = field(repr=False)
    _sign: Callable[[bytes], bytes] = field(repr=False)
    _query: str = field(repr=False)
    credentials: S3Credentials | None = field(default=None, repr=False)
    _path: str = field(default="", init=False)
    _host: str = field(default="", init=False)
    _opening: str = field(default="", init=False, repr=False)

    @classmethod
    def of(cls, base: str, region: str, credentials: S3Credentials, signed_at: int, seconds: int) -> Self:
        """Signs addresses that are valid for ``seconds``, or until the keys expire."""
        scope = Scope("AWS4-HMAC-SHA256", "X-Amz", signed_at, region, "s3", "aws4_request")
        key = f"AWS4{credentials.secret_access_key}".encode()
        for part in scope.parts:
            key = hmac.digest(key, part.encode(), "sha256")
        ends = signed_at + float(seconds)
        return cls(
            base,
            signed_at,
            ends if credentials.expires_at is None else min(ends, credentials.expires_at),
            scope,
            lambda text: hmac.digest(key, text, "sha256"),
            scope.query(credentials.access_key_id, seconds, credentials.session_token),
            credentials,
        )

    @classmethod
    def of_google(cls, base: str, email: str, key: RSAPrivateKey, signed_at: int, seconds: int) -> Self:
        """Signs by a service account, for the XML API. Each address takes a millisecond."""
        scope = Scope("GOOG4-RSA-SHA256", "X-Goog", signed_at, "auto", "storage", "goog4_request")
        query = scope.query(email, seconds, None)
        return cls(
            base, signed_at, signed_at + float(seconds), scope, lambda text: key.sign(text, PKCS1v15(), SHA256()), query
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_path", urlsplit(self.base).path)
        object.__setattr__(self, "_host", host_of(split_address(self.base)[0]))
        object.__setattr__(self, "_opening", self._scope.opening)

    def address(
        self,
        key: str,
        query: Mapping[str, str] = _NOTHING,
        *,
        method: str = "GET",
        headers: Sequence[tuple[str, str]] = (),
    ) -> str:
        """The address of a request for an object, or for the bucket if ``key`` is empty.

        The request must send ``headers``, whose names are in lower case. Names in ``query`` must begin with a
        lower-case letter, so that they sort after the parameters of the signature.
        """
        signed = sorted([("host", self._host), *headers])
        names = _SEPARATOR.join([name for name, _ in signed])
        more = "".join([f"&{name}={quote(query[name], safe='')}" for name in sorted(query)])
        asked = f"{self._query}&{self._scope.vendor}-SignedHeaders={names}{more}"
        lines = "".join([f"{name}:{value}\n" for name, value in signed])
        name = quote(key)
        request = f"{method}\n{self._path}{name}\n{asked}\n{lines}\n{names.replace(_SEPARATOR, ';')}\nUNSIGNED-PAYLOAD"
        text = self._opening + hashlib.sha256(request.encode()).hexdigest()
        return f"{self.base}{name}?{asked}&{self._scope.vendor}-Signature={self._sign(text.encode()).hex()}"


def plain_address(base: str, key: str, version_id: str | None = None) -> str:
    version = "" if version_id is None else f"?versionId={quote(version_id, safe='')}"
    return f"{base}{quote(key)}{version}"
