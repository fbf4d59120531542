"""Access tokens for a service account's own key: google-auth signs an assertion, and its token endpoint takes it.

The endpoint's address comes from a user's secret, so it is asked behind the egress guard, and only once per token.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final, cast
from urllib.parse import urlsplit

from google.auth.exceptions import GoogleAuthError
from google.oauth2 import service_account

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SecretMalformedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import ASK_ONCE
from bdn.core.ports import Asker
from bdn.sources.credentials import Secret, ServiceAccountKey, service_account_key
from bdn.sources.gcs.tokens import AccessToken, GoogleAnswer, google_transport
from bdn.sources.refreshing import Refreshing
from bdn.sources.settings import UpstreamSettings
from bdn.wire.http_fields import parse_retry_after

SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
_WORD: Final = re.compile(r"[a-z_]{1,40}")


class KeyTokens:
    """A provider of tokens (see there) of one service account. The first request is made by the first ``token``.

    Args:
        secret: the account's JSON.
        source: what is read with it, for messages.
        settings: the token endpoint where the JSON names none, and what the egress guard allows.
        clock: seconds since the epoch.
        asker: sends the requests.

    Raises:
        SecretMalformedError: it is not a service account's key.
    """

    def __init__(
        self,
        secret: Secret,
        source: str,
        settings: UpstreamSettings,
        *,
        clock: Callable[[], float] = time.time,
        asker: Asker = ASK_ONCE,
    ) -> None:
        self._source = source
        self._settings = settings
        key = service_account_key(secret)
        self._token_url = key.token_url or settings.google_token_url
        if self._token_url != settings.google_token_url and not self._token_url.startswith("https://"):
            raise SecretMalformedError(secret.name, 'has a "token_uri" that is not an https address')
        self._credentials = _credentials(secret.name, key, self._token_url)
        self._refreshing = Refreshing(self._ask, clock, f"secret {secret.name}")
        self._asker = asker

    async def token(self) -> AccessToken:
        """The token to use now.

        Raises:
            AuthRequiredError: the key is refused.
            EgressRefusedError: its token endpoint may not be contacted.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later.
        """
        return await self._refreshing.get()

    async def _ask(self) -> AccessToken:
        return await self._asker.ask(self._token_url, self._exchange)

    async def _exchange(self) -> AccessToken:
        async with google_transport(self._settings, self._source, partial(_refusal, self._source)) as transport:
            credentials = self._credentials
            try:
                await asyncio.to_thread(credentials.refresh, transport)
                expires_at = cast("datetime", credentials.expiry).replace(tzinfo=UTC)  # the library's times are bare
                return AccessToken(str(credentials.token), expires_at.timestamp())
            except (GoogleAuthError, AttributeError, LookupError, TypeError, ValueError) as error:
                # Not the cause: the library's own errors repeat what was received.
                reason = f"the answer does not look like a token endpoint's ({type(error).__name__})"
                raise UpstreamUnavailableError(self._source, reason) from None


def _credentials(name: str, key: ServiceAccountKey, token_url: str) -> service_account.Credentials:
    document = {
        "type": "service_account",
        "client_email": key.client_email,
        "private_key": key.private_key,
        "private_key_id": key.private_key_id,
        "token_uri": token_url,
    }
    try:
        made: service_account.Credentials = service_account.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
            document, scopes=[SCOPE]
        )
    except (GoogleAuthError, AttributeError, TypeError, ValueError):
        raise SecretMalformedError(name, 'has a "private_key" that is not a private key in PEM form') from None
    return made


def _refusal(source: str, answer: GoogleAnswer, url: str) -> BdnError:
    """For an answer other than 200. Descriptions stay out of it: they may repeat what was sent."""
    wait = parse_retry_after(answer.headers)
    if answer.status == 429:
        return UpstreamRateLimitedError(source, wait)
    if answer.status not in (400, 401, 403):
        said = f"{urlsplit(url).hostname} answered {answer.status} when it was asked for a token"
        return UpstreamUnavailableError(source, said, wait)
    reason = "the service account's key was revoked, the account is gone, or the clock of this machine is wrong"
    return AuthRequiredError(source, f"{_word(answer.data) or answer.status}: {reason}")


def _word(content: bytes) -> str | None:
    """``invalid_grant`` of {"error": "invalid_grant"} (RFC 6749, section 5.2)."""
    try:
        word = json.loads(content)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return word if isinstance(word, str) and _WORD.fullmatch(word) else None
