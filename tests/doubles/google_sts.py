"""Google's token services: the exchange of workload identity federation, and service account impersonation.

Strict about everything that the documents of both calls ask for. The access tokens are those of the GCS double's own token
endpoint, so that its buckets take them, and stop to when their time is over.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, unquote

from tests.doubles.gcs_accounts import TokenEndpoint
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.openid import OpenIdReader, TokenRefusedError

EXCHANGE = {
    "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
    "requested_token_type": "urn:ietf:params:oauth:token-type:access_token",
    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
}
# What a federated token has to be for, so that it can call generateAccessToken.
IAM_SCOPES = {"https://www.googleapis.com/auth/cloud-platform", "https://www.googleapis.com/auth/iam"}
_IMPERSONATE = re.compile(r"/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken")


@dataclass
class Provider:
    """A workload identity provider with the default audience; ``condition`` is a pattern of subjects."""

    issuer: str
    condition: str = "*"


@dataclass
class ServiceAccount:
    """``principals`` are patterns of subjects that may impersonate it, by pool."""

    principals: dict[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    def __init__(self, status: int, code: str, detail: str = "") -> None:
        super().__init__(f"{status} {code} {detail}")
        self.status, self.code = status, code


class GoogleTokenServer(Origin):
    """Both services on one free port of the loopback, from ``with`` until its end."""

    def __init__(self, reader: OpenIdReader, tokens: TokenEndpoint, clock: Callable[[], float]) -> None:
        super().__init__("google", self._respond)
        self.reader = reader
        self.clock = clock
        self.providers: dict[str, Provider] = {}
        self.accounts: dict[str, ServiceAccount] = {}
        self.federated: dict[str, tuple[str, str, float]] = {}  # pool, subject, end
        self.issued: list[str] = []
        self.refusals: list[str] = []
        self.subject_tokens: list[str] = []
        self._tokens = tokens
        self._numbers = count(1)

    @property
    def sts_url(self) -> str:
        return f"{self.url}/v1/token"

    def _respond(self, request: Request) -> Answer:
        iam = _IMPERSONATE.fullmatch(unquote(request.url.path))
        if request.method != "POST" or request.url.query or not (iam or request.url.path == "/v1/token"):
            return _json(404, {})
        try:
            return _json(200, self._generate(request, iam[1]) if iam else self._exchange(request))
        except RefusedError as error:
            self.refusals.append(str(error))
            if iam:
                document = {"error": {"code": error.status, "status": error.code, "message": "double"}}
                return _json(error.status, document)
            echoed = request.body.decode()  # as Google repeats parts of what it was sent
            return _json(error.status, {"error": error.code, "error_description": echoed})

    def _exchange(self, request: Request) -> dict[str, Any]:
        if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            raise RefusedError(400, "invalid_request", "not a form")
        form = dict(parse_qsl(request.body.decode(), strict_parsing=True))
        self.subject_tokens.append(form.get("subject_token", ""))
        if "authorization" in request.headers or {name: form.get(name) for name in EXCHANGE} != EXCHANGE:
            raise RefusedError(400, "invalid_request", str(form))
        scopes = set(form.get("scope", "").split())
        if not scopes or scopes - IAM_SCOPES:
            raise RefusedError(400, "invalid_scope", form.get("scope", ""))
        name = form.get("audience", "").removeprefix("//iam.googleapis.com/")
        provider = self.providers.get(name)
        if provider is None or not form["audience"].startswith("//iam."):
            raise RefusedError(400, "invalid_target", form.get("audience", ""))
        try:
            claims = self.reader.claims(
                form["subject_token"], issuer=provider.issuer, audience=f"https://iam.googleapis.com/{name}"
            )
        except TokenRefusedError as error:
            raise RefusedError(400, "invalid_grant", str(error)) from error
        subject = claims["sub"]
        if len(subject) > 127 or not fnmatchcase(subject, provider.condition):
            raise RefusedError(403, "unauthorized_client", subject)
        token = f"ya29.federated-{next(self._numbers)}"
        self.federated[token] = (name.partition("/providers/")[0], subject, self.clock() + 3600)
        return {
            "access_token": token,
            "issued_token_type": EXCHANGE["requested_token_type"],
            "token_type": "Bearer",
            "expires_in": 3600,
        }

    def _generate(self, request: Request, email: str) -> dict[str, Any]:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        pool, subject, end = self.federated.get(token, ("", "", 0.0))
        if kind != "Bearer" or end <= self.clock():
            raise RefusedError(401, "UNAUTHENTICATED")
        body = json.loads(request.body)
        if body.get("scope") != ["https://www.googleapis.com/auth/devstorage.read_only"]:
            raise RefusedError(400, "INVALID_ARGUMENT", str(body))
        lifetime = re.fullmatch(r"([0-9]+)s", body.get("lifetime", ""))
        if not lifetime or not 0 < int(lifetime[1]) <= 3600 or body.get("delegates"):
            raise RefusedError(400, "INVALID_ARGUMENT", str(body))
        account = self.accounts.get(email)
        if account is None or email not in self._tokens.accounts:
            raise RefusedError(404, "NOT_FOUND", email)
        if not fnmatchcase(subject, account.principals.get(pool, "")):
            raise RefusedError(403, "PERMISSION_DENIED", subject)
        expires_at = int(self.clock()) + min(self._tokens.token_seconds, int(lifetime[1]))
        access = self._tokens.give(self._tokens.accounts[email])
        self.issued.append(access)
        return {
            "accessToken": access,
            "expireTime": datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


def _json(status: int, document: dict[str, Any]) -> Answer:
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(document).encode())
