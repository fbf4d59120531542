"""This mirror as an OpenID issuer: short-lived identity tokens, and the documents with which clouds verify them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from bdn.core.errors import InvalidRequestError
from bdn.mirror.access.key_files import read_keys
from bdn.mirror.settings import MirrorSettings
from bdn.wire.access_schema import ORGANISATION_PATTERN
from bdn.wire.grants import private_keys

LIFETIME_SECONDS: Final = 600
_SKEW_SECONDS: Final = 30  # a cloud whose clock is behind rejects tokens from the future
DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
JWKS_PATH: Final = "/.well-known/jwks.json"
DRY_RUN: Final = "plan"  # the job of a dry run, which has no mirror
_ORGANISATION: Final = re.compile(ORGANISATION_PATTERN)
_JOB: Final = re.compile(r"[a-z0-9_]{2,32}")
_SESSION_NAME_LENGTH: Final = 64


@dataclass(frozen=True, slots=True)
class TokenSubject:
    """An organisation and its job: the mirror's id, which no caller can choose, or ``plan``."""

    organisation: str
    job: str

    def __post_init__(self) -> None:
        if not _ORGANISATION.fullmatch(self.organisation) or not _JOB.fullmatch(self.job):
            raise InvalidRequestError(
                f"organisation {self.organisation[:80]!r} cannot be named to a cloud: OIDC and AWS_ASSUME_ROLE need a name of "
                "at most 63 letters, digits, '.', '_' and '-'"
            )

    @property
    def claim(self) -> str:
        return f"v=1:org={self.organisation}:job={self.job}:type=mirror"

    @property
    def pattern(self) -> str:
        """All subjects of the organisation, as a trust policy names them."""
        return f"v=1:org={self.organisation}:job=*:type=mirror"

    @property
    def session_name(self) -> str:
        """The name of the session in the user's CloudTrail."""
        room = _SESSION_NAME_LENGTH - len(self.job) - 1
        return f"{self.organisation[:room]}@{self.job}"

    @property
    def external_id(self) -> str:
        """Required by a role's trust policy, so that no other organisation can use the role through this mirror."""
        return f"bdn:{self.organisation}"


@dataclass(frozen=True, slots=True)
class IdentityIssuer:
    """``url`` is the https address at which clouds fetch the two documents, without a trailing slash."""

    url: str
    keys: IdentityKeys
    clock: Callable[[], float] = time.time

    def token(self, subject: TokenSubject, audience: str) -> str:
        """A fresh token (JWT, RFC 7519) for one exchange; tokens are not stored."""
        now = int(self.clock())
        return self.keys.sign(
            {
                "iss": self.url,
                "aud": audience,
                "sub": subject.claim,
                "iat": now - _SKEW_SECONDS,
                "nbf": now - _SKEW_SECONDS,
                "exp": now + LIFETIME_SECONDS,
                "jti": secrets.token_urlsafe(16),
                "organisation": subject.organisation,
                "job": subject.job,
            }
        )

    def discovery(self) -> dict[str, str | list[str]]:
        """What OpenID Connect Discovery 1.0, section 3 requires of an issuer that issues no tokens over the network."""
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}{JWKS_PATH}",
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": [ALGORITHM],
            "claims_supported": ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "organisation", "job"],
        }

    def jwks(self) -> dict[str, list[Jwk]]:
        return {"keys": list(self.keys.published)}


ALGORITHM: Final = "RS256"  # accepted by AWS and by Google
_BITS: Final = 2048

Jwk = dict[str, str]


@dataclass(frozen=True, slots=True)
class IdentityKeys:
    """An RSA key that signs, and the public halves of all keys, starting with the signing key's."""

    signing: rsa.RSAPrivateKey = field(repr=False)
    published: tuple[Jwk, ...]

    @classmethod
    def parse(cls, pem: bytes) -> IdentityKeys:
        """From one or more concatenated PEM private keys. ``ValueError`` for anything else, without its content."""
        keys: list[rsa.RSAPrivateKey] = []
        for key in private_keys(pem):
            if not isinstance(key, rsa.RSAPrivateKey) or key.key_size < _BITS:
                raise ValueError(f"holds a key that is not RSA of at least {_BITS} bits")
            keys.append(key)
        return cls(keys[0], tuple(map(_published, keys)))

    def sign(self, claims: dict[str, str | int]) -> str:
        return jwt.encode(claims, self.signing, algorithm=ALGORITHM, headers={"kid": self.published[0]["kid"]})


def load_issuer(settings: MirrorSettings, clock: Callable[[], float]) -> IdentityIssuer | None:
    """The issuer with the operator's keys or this installation's own; None without ``BDN_ISSUER_URL``. Blocking.

    Raises ``InvalidRequestError``: as ``read_keys``.
    """
    if not settings.issuer_url:
        return None
    make = f"openssl genrsa -out FILE {_BITS}"
    keys = read_keys(settings, "identity_key_file", IdentityKeys.parse, new_identity_key, make)
    return IdentityIssuer(settings.issuer_url, keys, clock)


def new_identity_key() -> bytes:
    """A new private key, PEM. Takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=_BITS).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _published(key: rsa.RSAPrivateKey) -> Jwk:
    public = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    members = {name: str(public[name]) for name in ("e", "kty", "n")}
    # The thumbprint of RFC 7638: SHA-256 over the required members in the order of their names, without white space.
    thumbprint = hashlib.sha256(json.dumps(members, sort_keys=True, separators=(",", ":")).encode()).digest()
    key_id = base64.urlsafe_b64encode(thumbprint).rstrip(b"=").decode()
    return {**members, "kid": key_id, "alg": ALGORITHM, "use": "sig"}
