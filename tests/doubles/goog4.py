"""Checks the signature of Google's "V4 signing process" in an address, as Cloud Storage does. Written from its page, "Signatures"."""

import hashlib
from datetime import UTC, datetime
from urllib.parse import unquote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256

from tests.doubles.gcs_accounts import GoogleAccount, private_key_of
from tests.doubles.http_origin import Request


def google_refusal_of(request: Request, account: GoogleAccount, now: float) -> str | None:
    """The error code, or None when the account has signed it and it is in time."""
    query = [part.partition("=")[::2] for part in request.url.query.split("&") if part]
    given = {name: unquote(value) for name, value in query}
    if "X-Goog-Signature" not in given or given["X-Goog-Algorithm"] != "GOOG4-RSA-SHA256":
        return "AccessDenied"
    email, _, scope = given["X-Goog-Credential"].partition("/")
    if email != account.email or scope != f"{given['X-Goog-Date'][:8]}/auto/storage/goog4_request":
        return "AccessDenied"
    names = given["X-Goog-SignedHeaders"].split(";")
    if names != sorted(names) or "host" not in names:
        return "MalformedSecurityHeader"
    if any(name.startswith("x-goog-") and name not in names for name in request.headers):
        return "AccessDenied"
    canonical = "\n".join((
        request.method,
        request.url.path,
        "&".join(f"{name}={value}" for name, value in sorted(query) if name != "X-Goog-Signature"),
        *(f"{name}:{request.headers[name].strip()}" for name in names),
        "",
        ";".join(names),
        "UNSIGNED-PAYLOAD",
    ))  # fmt: skip
    text = f"GOOG4-RSA-SHA256\n{given['X-Goog-Date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    try:
        key = private_key_of(account.name).public_key()
        key.verify(bytes.fromhex(given["X-Goog-Signature"]), text.encode(), PKCS1v15(), SHA256())
    except (InvalidSignature, ValueError):
        return "SignatureDoesNotMatch"
    signed_at = datetime.strptime(given["X-Goog-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    return "ExpiredToken" if now > signed_at + int(given["X-Goog-Expires"]) else None
