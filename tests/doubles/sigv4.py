"""Checks AWS Signature Version 4 as S3 does, in headers and in presigned addresses, because moto takes any key.

Written from the AWS documentation ("Authenticating Requests: AWS Signature Version 4"), not from botocore, so that
botocore's signatures are checked by something else than botocore.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

from tests.doubles.http_origin import Request


@dataclass(frozen=True, slots=True)
class Account:
    access_key_id: str
    secret_access_key: str
    session_token: str | None = None


@dataclass(frozen=True, slots=True)
class _Claim:
    credential: str
    signed_headers: str
    signature: str
    date: str
    payload: str
    query: tuple[tuple[str, str], ...]
    token: str | None


def refusal_of(
    request: Request, accounts: Mapping[str, Account], now: datetime | None = None, service: str = "s3"
) -> str | None:
    """S3's error code for a request that is not signed well, ``""`` for one that is, and None for one not signed."""
    claim = _presigned(request) or _in_header(request)
    if claim is None:
        return None
    access_key_id, *scope = claim.credential.split("/")
    account = accounts.get(access_key_id)
    if account is None:
        return "InvalidAccessKeyId"
    if scope[2:] != [service, "aws4_request"]:
        return "SignatureDoesNotMatch"
    if account.session_token != claim.token:
        return "InvalidToken"
    if not hmac.compare_digest(claim.signature, _signature(request, claim, account, scope)):
        return "SignatureDoesNotMatch"
    lifetime = int(dict(claim.query).get("X-Amz-Expires", "900"))
    signed_at = datetime.strptime(claim.date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    is_late = (now or datetime.now(UTC)) > signed_at + timedelta(seconds=lifetime)
    return "AccessDenied" if is_late or _leaves_unsigned(request, claim) else ""


def _leaves_unsigned(request: Request, claim: _Claim) -> bool:
    """Whether a header that changes what is asked for stands beside the signature: "… which were not signed"."""
    signed = claim.signed_headers.split(";")
    return "host" not in signed or any(name.startswith("x-amz-") and name not in signed for name in request.headers)


def region_of(request: Request) -> str | None:
    """The region that a request is signed for."""
    claim = _presigned(request) or _in_header(request)
    return claim.credential.split("/")[2] if claim else None


def _query_of(request: Request) -> tuple[tuple[str, str], ...]:
    parts = (part.partition("=") for part in request.url.query.split("&") if part)
    return tuple((name, value) for name, _, value in parts)


def _presigned(request: Request) -> _Claim | None:
    query = _query_of(request)
    given = {name: unquote(value) for name, value in query}
    if "X-Amz-Signature" not in given:
        return None
    signed = tuple(pair for pair in query if pair[0] != "X-Amz-Signature")
    return _Claim(
        given["X-Amz-Credential"],
        given["X-Amz-SignedHeaders"],
        given["X-Amz-Signature"],
        given["X-Amz-Date"],
        "UNSIGNED-PAYLOAD",
        signed,
        given.get("X-Amz-Security-Token"),
    )


def _in_header(request: Request) -> _Claim | None:
    method, _, rest = request.headers.get("authorization", "").partition(" ")
    if method != "AWS4-HMAC-SHA256":
        return None
    given = dict(part.strip().split("=", 1) for part in rest.split(","))
    query = _query_of(request)
    return _Claim(
        given["Credential"],
        given["SignedHeaders"],
        given["Signature"],
        request.headers["x-amz-date"],
        request.headers.get("x-amz-content-sha256") or hashlib.sha256(request.body).hexdigest(),  # S3 alone wants it
        query,
        request.headers.get("x-amz-security-token"),
    )


def _signature(request: Request, claim: _Claim, account: Account, scope: list[str]) -> str:
    names = claim.signed_headers.split(";")
    canonical = "\n".join(
        (
            request.method,
            request.url.path,
            "&".join(f"{name}={value}" for name, value in sorted(claim.query)),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in names),
            "",
            claim.signed_headers,
            claim.payload,
        )
    )
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", claim.date, "/".join(scope), hashed))
    key = f"AWS4{account.secret_access_key}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()
