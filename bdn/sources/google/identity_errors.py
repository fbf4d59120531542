"""What a failure of Google's token services means for the user: which pool, provider or binding to change, and how."""

from __future__ import annotations

import json
import re
from typing import Final
from urllib.parse import urlsplit

from bdn.core.errors import AuthRequiredError, BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.sources.google.transport import GoogleAnswer
from bdn.sources.sign_in import GoogleServiceAccount
from bdn.wire.http_fields import parse_retry_after

_CODE: Final = re.compile(r"[A-Za-z_]{1,60}")


def refusal(sign_in: GoogleServiceAccount, source: str, answer: GoogleAnswer, url: str) -> BdnError:
    """For an answer other than 200. Descriptions stay out of it: they repeat parts of tokens."""
    host = urlsplit(url).hostname
    status, headers, code = answer.status, answer.headers, _code_of(answer.data) or str(answer.status)
    if status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if not 400 <= status < 500 or status in (408, 425):
        return UpstreamUnavailableError(source, f"{host} answered {status} {code}")
    assertion = sign_in.assertion
    if url.endswith(":generateAccessToken"):
        pool = sign_in.provider.partition("/providers/")[0]
        remedy = (
            f"Grant roles/iam.workloadIdentityUser on {sign_in.email} to the principal or principalSet of "
            f"//iam.googleapis.com/{pool} that holds the subjects {assertion.subjects}, enable the API "
            "iamcredentials.googleapis.com in the account's project, and check that the account exists"
        )
        return AuthRequiredError(source, f"{code}: {sign_in.email} cannot be impersonated", remedy)
    remedy = (
        f"The provider has to exist with the issuer {assertion.issuer} and the default audience, Google has to reach "
        f"{assertion.issuer}/.well-known/openid-configuration, and the provider's attribute mapping and condition have to "
        f"admit subjects like {assertion.subjects}"
    )
    return AuthRequiredError(source, f"{code}: {sign_in.provider} does not take this mirror's identity token", remedy)


def _code_of(content: bytes) -> str | None:
    """``invalid_grant`` of {"error": "invalid_grant"}, or ``PERMISSION_DENIED`` of {"error": {"status": …}}."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("status") if isinstance(error, dict) else error
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None
