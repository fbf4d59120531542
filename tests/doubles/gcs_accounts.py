"""Google's token endpoint for service accounts: a signed assertion becomes an access token (RFC 7523).

Written from Google's documentation ("Using OAuth 2.0 for Server to Server Applications"), and checks what it is sent with
something else than google-auth.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.doubles.http_origin import Answer, Request

READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
AUDIENCE = "https://oauth2.googleapis.com/token"  # whatever address the double itself has
GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_NUMBERS = count(1)


@lru_cache(maxsize=8)
def private_key_of(name: str) -> rsa.RSAPrivateKey:
    """One key per name and process, because making one takes a tenth of a second."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass(frozen=True, slots=True)
class GoogleAccount:
    name: str

    @property
    def email(self) -> str:
        return f"{self.name}@double.iam.gserviceaccount.com"

    @property
    def key_id(self) -> str:
        return f"{self.name}-key"

    @property
    def pem(self) -> str:
        key = private_key_of(self.name)
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    def short_key(self) -> dict[str, str]:
        """The form that truss takes."""
        return {"private_key_id": self.key_id, "private_key": self.pem, "client_email": self.email}

    def key(self, token_url: str) -> dict[str, str]:
        """The file that Google's console gives out."""
        return {
            "type": "service_account",
            "project_id": "double",
            **self.short_key(),
            "client_id": "1",
            "auth_uri": "https://accounts.google.com/o/oauth2/auth",
            "token_uri": token_url,
            "universe_domain": "googleapis.com",
        }


class TokenEndpoint:
    """Knows accounts, gives out tokens, and says whose a token is. ``clock`` is in seconds since the epoch."""

    def __init__(self, clock: Callable[[], float], *, token_seconds: int = 3600) -> None:
        self.accounts: dict[str, GoogleAccount] = {}
        self.assertions: list[str] = []  # all that were sent
        self.token_seconds = token_seconds
        self.skew_seconds = 0.0  # of the machine that signs, seen from here
        self._clock = clock
        self._tokens: dict[str, tuple[str, float]] = {}

    def account(self, name: str) -> GoogleAccount:
        """A new account with a key."""
        account = GoogleAccount(name)
        self.accounts[account.email] = account
        return account

    def owner_of(self, token: str) -> str | None:
        """The account's email; None for a token that nobody gave out or that has ended."""
        email, ends_at = self._tokens.get(token, (None, 0.0))
        return email if self._clock() < ends_at else None

    def give(self, account: GoogleAccount) -> str:
        token = f"ya29.double-{next(_NUMBERS)}"
        self._tokens[token] = (account.email, self._clock() + self.token_seconds)
        return token

    def respond(self, request: Request) -> Answer:
        if (request.method, request.url.path) != ("POST", "/token"):
            return Answer(404)
        form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        if form.get("grant_type") != GRANT:
            return _refusal("unsupported_grant_type", "Invalid grant_type")
        self.assertions.append(form.get("assertion", ""))
        try:
            account = self._proved(self.assertions[-1])
        except (_RefusedError, jwt.InvalidTokenError) as error:
            return _refusal("invalid_grant", f"Invalid JWT: {error}")
        document = {"access_token": self.give(account), "expires_in": self.token_seconds, "token_type": "Bearer"}
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _proved(self, assertion: str) -> GoogleAccount:
        """Whose assertion it is; raises when it does not prove that."""
        header = jwt.get_unverified_header(assertion)
        unproved: Mapping[str, Any] = jwt.decode(assertion, options={"verify_signature": False})
        account = self.accounts.get(unproved.get("iss", ""))
        if account is None or header.get("kid") != account.key_id:
            raise _RefusedError("no such account or key")
        # Times are checked below, by the machine's clock: google-auth signs with no other.
        claims = jwt.decode(
            assertion,
            private_key_of(account.name).public_key(),
            algorithms=["RS256"],
            audience=AUDIENCE,
            options={"verify_exp": False, "verify_iat": False, "require": ["iss", "aud", "iat", "exp", "scope"]},
        )
        now = time.time() + self.skew_seconds
        if not (claims["iat"] <= now + 300 and now < claims["exp"] <= claims["iat"] + 3600):
            raise _RefusedError("Token must be a short-lived token and in a reasonable timeframe")
        if claims["scope"] != READ_ONLY:
            raise _RefusedError("a scope that was not expected")
        return account


class _RefusedError(Exception):
    """Why an assertion is not taken."""


def _refusal(error: str, description: str) -> Answer:
    body = json.dumps({"error": error, "error_description": description}).encode()
    return Answer(400, {"Content-Type": "application/json"}, body)
