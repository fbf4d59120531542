"""The keys behind this mirror's identity tokens: the first one signs, all are published (JWKS)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from bdn.core.errors import InvalidRequestError
from bdn.mirror.keys import kept_key

ALGORITHM: Final = "RS256"  # the one that AWS and Google both take
_BITS: Final = 2048
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.+?-----END \1-----", re.DOTALL)

Jwk = dict[str, str]


@dataclass(frozen=True, slots=True)
class IdentityKeys:
    """An RSA key that signs, and the public halves of all keys, the signing one's first."""

    signing: rsa.RSAPrivateKey = field(repr=False)
    published: tuple[Jwk, ...]

    @classmethod
    def parse(cls, pem: bytes) -> IdentityKeys:
        """From one or more private keys, PEM, one after the other. ``ValueError`` for anything else; it repeats nothing."""
        keys: list[rsa.RSAPrivateKey] = []
        for block in _PEM.finditer(pem):
            try:
                key = serialization.load_pem_private_key(block[0], password=None)
            except (ValueError, TypeError):
                raise ValueError("holds a key that cannot be read") from None
            if not isinstance(key, rsa.RSAPrivateKey) or key.key_size < _BITS:
                raise ValueError(f"holds a key that is not RSA of at least {_BITS} bits")
            keys.append(key)
        if not keys:
            raise ValueError("holds no private key in PEM")
        return cls(keys[0], tuple(map(_published, keys)))

    def sign(self, claims: dict[str, str | int]) -> str:
        """The token (JWT)."""
        return jwt.encode(claims, self.signing, algorithm=ALGORITHM, headers={"kid": self.published[0]["kid"]})


def load_identity_keys(data_dir: Path, file: Path | None) -> IdentityKeys:
    """The operator's file, or this installation's own key, which is made when there is none. Blocking.

    Raises:
        InvalidRequestError: the file cannot be used, for the operator.
    """
    try:
        pem = file.read_bytes() if file else kept_key(data_dir / "identity-key.pem", new_identity_key)
    except OSError as error:
        raise InvalidRequestError(f"BDN_IDENTITY_KEY_FILE: {file} cannot be read: {error.strerror}") from error
    try:
        return IdentityKeys.parse(pem)
    except ValueError as error:
        raise InvalidRequestError(
            f"the file of identity keys {file or data_dir / 'identity-key.pem'} {error}; "
            f"make one with: openssl genrsa -out FILE {_BITS}"
        ) from None


def new_identity_key() -> bytes:
    """A fresh private key, PEM. Takes a tenth of a second."""
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
