"""A cloud's side of OpenID Connect: checks an identity token against the documents that its issuer serves."""

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jwt

REQUIRED = ("iss", "aud", "sub", "iat", "nbf", "exp", "jti")
LONGEST_SECONDS = 24 * 3600
SKEW_SECONDS = 5


class TokenRefusedError(Exception):
    """Why a token is not taken: ``expired``, ``unreachable`` or ``invalid``, and what of it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass
class OpenIdReader:
    """Reads the documents anew for each token.

    ``reach`` is where the test serves an issuer's address: what name service, TLS and proxies are in the world.
    """

    clock: Callable[[], float]
    reach: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def claims(self, token: str, *, issuer: str, audience: str) -> dict[str, Any]:
        """The token's claims, when everything about it is right."""
        header = jwt.get_unverified_header(token)
        if header.get("alg") != "RS256" or header.get("typ") != "JWT":
            raise TokenRefusedError("invalid", f"header {header}")
        discovery = self._read(issuer, f"{issuer}/.well-known/openid-configuration")
        if discovery.get("issuer") != issuer:
            raise TokenRefusedError("invalid", "the document is another issuer's")
        for member, value in (
            ("response_types_supported", "id_token"),
            ("subject_types_supported", "public"),
            ("id_token_signing_alg_values_supported", "RS256"),
        ):
            if value not in discovery.get(member, ()):
                raise TokenRefusedError("invalid", f"the document lacks {member}")
        keys = {key["kid"]: key for key in self._read(issuer, discovery["jwks_uri"])["keys"]}
        if any({"d", "p", "q", "dp", "dq", "qi"} & set(key) for key in keys.values()):
            raise AssertionError("a private key is published")
        key = keys.get(header.get("kid"))
        if key is None or key["use"] != "sig" or key["kty"] != "RSA":
            raise TokenRefusedError("invalid", "signed with a key that is not published")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                jwt.PyJWK(key),
                algorithms=["RS256"],
                audience=audience,
                issuer=issuer,
                options={"require": list(REQUIRED), "verify_exp": False, "verify_iat": False, "verify_nbf": False},
            )
        except jwt.PyJWTError as error:
            raise TokenRefusedError("invalid", str(error)) from error
        now = self.clock()
        if claims["exp"] + SKEW_SECONDS < now:
            raise TokenRefusedError("expired", f"{now - claims['exp']:.0f} s ago")
        if max(claims["iat"], claims["nbf"]) > now + SKEW_SECONDS or claims["exp"] - claims["iat"] > LONGEST_SECONDS:
            raise TokenRefusedError("invalid", "from the future, or for too long")
        if claims["jti"] in self.seen:
            raise TokenRefusedError("invalid", "used twice")
        self.seen.add(claims["jti"])
        return claims

    def _read(self, issuer: str, url: str) -> dict[str, Any]:
        if not url.startswith(f"{issuer}/") or issuer not in self.reach:
            raise TokenRefusedError("unreachable", url)
        try:
            with urllib.request.urlopen(self.reach[issuer] + url.removeprefix(issuer), timeout=10) as answer:
                assert "max-age=" in answer.headers["Cache-Control"]
                document: dict[str, Any] = json.load(answer)
        except OSError as error:
            raise TokenRefusedError("unreachable", url) from error
        return document
