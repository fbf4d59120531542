"""An access token for a user's service account: workload identity federation, then impersonation, by google-auth.

The library knows the two exchanges. Its credentials are made anew for each token, because they watch the wall clock
themselves.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, cast
from urllib.parse import urlsplit

from google.auth import identity_pool
from google.auth.exceptions import GoogleAuthError

from bdn.core.errors import AuthRequiredError, BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.core.pace.retry import ASK_ONCE
from bdn.core.ports import Asker
from bdn.sources.gcs.tokens import AccessToken, GoogleAnswer, google_transport
from bdn.sources.refreshing import Refreshing
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import GoogleServiceAccount
from bdn.wire.http_fields import parse_retry_after

SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
TOKEN_SECONDS: Final = 3600  # the most that impersonation gives without a policy of the organisation
_JWT: Final = "urn:ietf:params:oauth:token-type:jwt"


class ServiceAccountTokens:
    """A provider of tokens (see there) of one service account. The first request is made by the first ``token``.

    Args:
        sign_in: the account, and the provider that takes this mirror's word.
        source: what is read with it, for messages.
        settings: where Google's services are.
        clock: seconds since the epoch.
        asker: sends the requests.
    """

    def __init__(
        self,
        sign_in: GoogleServiceAccount,
        source: str,
        settings: UpstreamSettings,
        *,
        clock: Callable[[], float] = time.time,
        asker: Asker = ASK_ONCE,
    ) -> None:
        self._sign_in = sign_in
        self._source = source
        self._settings = settings
        self._refreshing = Refreshing(self._ask, clock, sign_in.email)
        self._asker = asker

    async def token(self) -> AccessToken:
        """The token to use now.

        Raises:
            AuthRequiredError: it is refused; says by whom, and what to change.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later.
        """
        return await self._refreshing.get()

    async def _ask(self) -> AccessToken:
        return await self._asker.ask(self._settings.google_sts_url, self._exchange)

    async def _exchange(self) -> AccessToken:
        sign_in, settings = self._sign_in, self._settings
        credentials = identity_pool.Credentials(  # type: ignore[no-untyped-call]
            audience=sign_in.audience,
            subject_token_type=_JWT,
            token_url=settings.google_sts_url,
            subject_token_supplier=_Supplier(sign_in),
            service_account_impersonation_url=(
                f"{settings.google_iam_url}/v1/projects/-/serviceAccounts/{sign_in.email}:generateAccessToken"
            ),
            service_account_impersonation_options={"token_lifetime_seconds": TOKEN_SECONDS},
            scopes=[SCOPE],
        )
        async with google_transport(settings, self._source, partial(refusal, sign_in, self._source)) as transport:
            try:
                await asyncio.to_thread(credentials.refresh, transport)
                token, expires_at = str(credentials.token), cast("datetime", credentials.expiry)
                return AccessToken(token, expires_at.replace(tzinfo=UTC).timestamp())  # the library's times are bare
            except (GoogleAuthError, AttributeError, KeyError, TypeError, ValueError) as error:
                # Not the cause: the library's own errors repeat what was received.
                reason = f"the answer does not look like Google's ({type(error).__name__})"
                raise UpstreamUnavailableError(self._source, reason) from None


@dataclass(frozen=True)
class _Supplier(identity_pool.SubjectTokenSupplier):
    sign_in: GoogleServiceAccount

    def get_subject_token(self, context: object, request: object) -> str:  # noqa: ARG002 - the library's signature
        return self.sign_in.assertion.sign(self.sign_in.token_audience)


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
