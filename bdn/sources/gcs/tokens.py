"""Who reads a bucket of Google, in the only form that its requests need: a token, and until when it is good."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import aiohttp
from google.auth import identity_pool
from google.auth.exceptions import GoogleAuthError
from google.oauth2 import service_account

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SecretMalformedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import ASK_ONCE, Asker
from bdn.sources.guarded_connector import guarded_connector, proxy_for
from bdn.sources.refreshing import Refreshing
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import GoogleServiceAccount, Secret, ServiceAccountKey, service_account_key
from bdn.wire.http_fields import parse_retry_after


@dataclass(frozen=True, slots=True)
class AccessToken:
    """An OAuth 2.0 access token. ``expires_at`` is in seconds since the epoch; None where it is not known to expire."""

    value: str = field(repr=False)
    expires_at: float | None


class TokenProvider(Protocol):
    """Where the token comes from: a service account's key, a federation, or anything else that Google accepts."""

    async def token(self) -> AccessToken:
        """A token that is good for some minutes more; usually the last one, without a request.

        Raises:
            AuthRequiredError: Google refuses to give one.
            UpstreamRateLimitedError, UpstreamUnavailableError: it may, later.
        """
        ...


_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, connect=10)
_LONGEST_ANSWER: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class GoogleAnswer:
    """An answer as google-auth wants it (``google.auth.transport.Response``)."""

    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GoogleTransport:
    """``google.auth.transport.Request``.

    A refusal is our error at once: the library would ask again, after sleeping, and forget status and ``Retry-After``.

    Args:
        session: asks.
        loop: where it asks.
        source: what is read with the token, for messages.
        refusal: the error for an answer other than 200 from this address.
    """

    session: aiohttp.ClientSession
    loop: asyncio.AbstractEventLoop
    source: str
    refusal: Callable[[GoogleAnswer, str], BdnError]

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        **_: object,
    ) -> GoogleAnswer:
        """The answer, when its status is 200. Blocking; not called on the event loop."""
        asking = self._ask(url, method, body, dict(headers or {}))
        return asyncio.run_coroutine_threadsafe(asking, self.loop).result()

    async def _ask(self, url: str, method: str, body: bytes | None, headers: dict[str, str]) -> GoogleAnswer:
        content = bytearray()
        try:
            async with self.session.request(
                method, url, data=body, headers=headers, allow_redirects=False, proxy=proxy_for(url)
            ) as response:
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > _LONGEST_ANSWER:
                        break  # cut, it is no JSON
                answer = GoogleAnswer(response.status, response.headers, bytes(content))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"{urlsplit(url).hostname} could not be asked for a token ({type(error).__name__})"
            raise UpstreamUnavailableError(self.source, reason) from None  # its text may repeat what was sent
        if answer.status != 200:
            raise self.refusal(answer, url)
        return answer


@asynccontextmanager
async def google_transport(
    settings: UpstreamSettings, source: str, refusal: Callable[[GoogleAnswer, str], BdnError]
) -> AsyncIterator[GoogleTransport]:
    """A transport whose connections are closed at the end."""
    tls = await asyncio.to_thread(_authorities, settings.ca_bundle)
    connector = guarded_connector(settings.egress, ssl=tls)
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
        yield GoogleTransport(session, asyncio.get_running_loop(), source, refusal)


@cache
def _authorities(ca_bundle: str | None) -> ssl.SSLContext:
    """Read once: it takes a tenth of a second."""
    return ssl.create_default_context(cafile=ca_bundle)


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
