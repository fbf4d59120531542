"""This mirror as an OpenID issuer: short-lived tokens that say who asks, and the documents with which clouds check them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upstream.issuer_keys import ALGORITHM, IdentityKeys, Jwk, load_identity_keys
from bdn.mirror.upstream.subject import Subject

LIFETIME_SECONDS: Final = 600
_SKEW_SECONDS: Final = 30  # a cloud whose clock is behind ours takes a token from the future for invalid
DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
JWKS_PATH: Final = "/.well-known/jwks.json"


@dataclass(frozen=True, slots=True)
class IdentityIssuer:
    """``url`` is the https address under which clouds reach the two documents, without a slash at its end."""

    url: str
    keys: IdentityKeys
    clock: Callable[[], float] = time.time

    def token(self, subject: Subject, audience: str) -> str:
        """A token (JWT, RFC 7519) for one exchange. Made again for each: nothing of it is kept."""
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
        """What OpenID Connect Discovery 1.0, section 3 requires of an issuer that hands out no tokens over the network."""
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}{JWKS_PATH}",
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": [ALGORITHM],
            "claims_supported": ["iss", "aud", "sub", "iat", "nbf", "exp", "jti", "organisation", "job"],
        }

    def jwks(self) -> dict[str, list[Jwk]]:
        """The public keys (RFC 7517)."""
        return {"keys": list(self.keys.published)}


def load_issuer(settings: MirrorSettings, clock: Callable[[], float]) -> IdentityIssuer | None:
    """The issuer with its keys, None without ``BDN_ISSUER_URL``. Blocking.

    Raises:
        InvalidRequestError: the keys cannot be used. Also where several processes would each make a key of their own: a
            worker's tokens have to be checked against the document that another one serves.
    """
    if not settings.issuer_url:
        return None
    if not settings.is_embedded and settings.identity_key_file is None:
        raise InvalidRequestError(
            "BDN_ISSUER_URL beside BDN_DATABASE_URL needs BDN_IDENTITY_KEY_FILE, the same key for every replica and worker; "
            "make it with: openssl genrsa -out FILE 2048"
        )
    return IdentityIssuer(settings.issuer_url, load_identity_keys(settings.data_dir, settings.identity_key_file), clock)
