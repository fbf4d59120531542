"""A local AWS STS: moto's answers behind real checks of identity tokens, external ids, signatures and trust policies.

The keys that it gives out open the buckets of an S3 double until they end.

    sts = StsServer(OpenIdReader(clock), s3.accounts, clock)
    sts.roles["arn:aws:iam::123456789012:role/weights"] = WebTrust("https://bdn.test", "v=1:org=acme:job=*:type=mirror")
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from urllib.parse import parse_qsl
from xml.etree import ElementTree as ET

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.test import EnvironBuilder, run_wsgi_app

from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.openid import OpenIdReader, TokenRefusedError
from tests.doubles.sigv4 import Account, refusal_of

NAMESPACE = "{https://sts.amazonaws.com/doc/2011-06-15/}"
STATUS = {"AccessDenied": 403, "InvalidClientTokenId": 403, "SignatureDoesNotMatch": 403}


@dataclass(frozen=True)
class WebTrust:
    """A trust policy for tokens of one issuer, by audience and subject (StringLike)."""

    issuer: str
    subject: str
    audience: str = "sts.amazonaws.com"


@dataclass(frozen=True)
class AccountTrust:
    """A trust policy for one principal, by its access key, and one external id."""

    access_key_id: str
    external_id: str


class RefusedError(Exception):
    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code} {detail}")
        self.code = code


@dataclass(frozen=True)
class Session:
    """A role that was taken."""

    role: str
    name: str
    account: Account
    expires_at: float
    subject: str | None


class StsServer(Origin):
    """STS on a free port of the loopback, from ``with`` until its end."""

    def __init__(self, reader: OpenIdReader, opens: dict[str, Account], clock: Callable[[], float]) -> None:
        super().__init__("sts", self._respond)
        self.reader = reader
        self.clock = clock
        self.principals: dict[str, Account] = {}
        self.roles: dict[str, WebTrust | AccountTrust] = {}
        self.sessions: list[Session] = []
        self.refusals: list[str] = []
        self.bodies: list[dict[str, str]] = []
        self.lifetime_seconds: int | None = None  # shorter than what is asked for
        self._opens = opens
        self._moto = create_backend_app("sts")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for session in self.sessions:
            self._opens.pop(session.account.access_key_id, None)

    def end_sessions(self) -> None:
        """Keys whose time is over open nothing any more."""
        for session in self.sessions:
            if session.expires_at <= self.clock():
                self._opens.pop(session.account.access_key_id, None)

    def _respond(self, request: Request) -> Answer:
        form = dict(parse_qsl(request.body.decode(), strict_parsing=True, keep_blank_values=True))
        self.bodies.append(form)
        try:
            subject = self._check(request, form)
        except RefusedError as error:
            self.refusals.append(str(error))
            return _error(error.code)
        return self._answer(request, form, subject)

    def _check(self, request: Request, form: dict[str, str]) -> str | None:
        if request.method != "POST" or request.url.path != "/" or form.get("Version") != "2011-06-15":
            raise RefusedError("InvalidAction")
        if not re.fullmatch(r"[\w+=,.@-]{2,64}", form.get("RoleSessionName", ""), re.ASCII):
            raise RefusedError("ValidationError", "RoleSessionName")
        if not 900 <= int(form.get("DurationSeconds", "3600")) <= 3600:
            raise RefusedError("ValidationError", "DurationSeconds")
        trust = self.roles.get(form.get("RoleArn", ""))
        match form.get("Action"):
            case "AssumeRoleWithWebIdentity":
                return self._check_token(request, form, trust)
            case "AssumeRole":
                self._check_principal(request, form, trust)
                return None
            case _:
                raise RefusedError("InvalidAction")

    def _check_token(self, request: Request, form: dict[str, str], trust: WebTrust | AccountTrust | None) -> str:
        if "authorization" in request.headers or form.keys() - {
            "Action", "Version", "RoleArn", "RoleSessionName", "DurationSeconds", "WebIdentityToken",
        }:  # fmt: skip
            raise RefusedError("ValidationError", "more than this call takes")
        if not isinstance(trust, WebTrust):
            raise RefusedError("AccessDenied", "no such role, or it trusts no issuer")
        try:
            claims = self.reader.claims(form["WebIdentityToken"], issuer=trust.issuer, audience=trust.audience)
        except TokenRefusedError as error:
            code = {"expired": "ExpiredTokenException", "unreachable": "InvalidIdentityToken"}
            raise RefusedError(code.get(error.kind, "InvalidIdentityToken"), str(error)) from error
        if not fnmatchcase(claims["sub"], trust.subject):
            raise RefusedError("AccessDenied", claims["sub"])
        return str(claims["sub"])

    def _check_principal(self, request: Request, form: dict[str, str], trust: WebTrust | AccountTrust | None) -> None:
        refusal = refusal_of(request, self.principals, service="sts")
        if refusal is None:
            raise RefusedError("MissingAuthenticationToken")
        if refusal:
            raise RefusedError({"InvalidAccessKeyId": "InvalidClientTokenId"}.get(refusal, refusal))
        caller = request.headers["authorization"].partition("Credential=")[2].partition("/")[0]
        if not isinstance(trust, AccountTrust) or (caller, form.get("ExternalId")) != (
            trust.access_key_id,
            trust.external_id,
        ):
            raise RefusedError("AccessDenied", f"external id {form.get('ExternalId')}")

    def _answer(self, request: Request, form: dict[str, str], subject: str | None) -> Answer:
        environ = EnvironBuilder(
            "/", method="POST", headers=list(request.headers.items()), data=request.body
        ).get_environ()
        chunks, status, headers = run_wsgi_app(self._moto, environ, buffered=True)
        assert status.startswith("200"), status
        document = ET.fromstring(b"".join(chunks))
        found = {part.tag.removeprefix(NAMESPACE): part for part in document.iter()}
        life = self.lifetime_seconds or int(form["DurationSeconds"])
        expires_at = float(int(self.clock()) + life)
        found["Expiration"].text = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = [found[name].text or "" for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")]
        # moto's session tokens are alike but for their end, which is enough for it, not for tests that search for them.
        account = Account(*keys)
        self._opens[account.access_key_id] = account
        self.sessions.append(Session(form["RoleArn"], form["RoleSessionName"], account, expires_at, subject))
        return Answer(200, {"Content-Type": headers.get("Content-Type") or "text/xml"}, ET.tostring(document))


def sts_error(code: str) -> bytes:
    return (
        f'<ErrorResponse xmlns="{NAMESPACE[1:-1]}"><Error><Type>Sender</Type><Code>{code}</Code>'
        "<Message>double</Message></Error><RequestId>0</RequestId></ErrorResponse>"
    ).encode()


def _error(code: str) -> Answer:
    return Answer(STATUS.get(code, 400), {"Content-Type": "text/xml"}, sts_error(code))
