"""OAuth tokens for buckets of Google, from a service account's key or by workload identity federation."""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from google.auth import identity_pool
from google.auth.exceptions import GoogleAuthError
from google.oauth2 import service_account

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidRequestError,
    SecretMalformedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import StallPolicy
from bdn.core.source.uri import BucketUri
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool
from bdn.net.tls import Authorities
from bdn.net.unreachable import unreachable
from bdn.sources.refreshing import Refreshing
from bdn.sources.sign_in import GoogleServiceAccount, Secret, SourceContext, service_account_key
from bdn.wire.http_fields import parse_retry_after
from bdn.wire.shapes import json_object

SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
TOKEN_SECONDS: Final = 3600  # the most that impersonation allows without a policy of the organisation
_AMBIENT: Final = "GOOGLE_APPLICATION_CREDENTIALS"
_JWT: Final = "urn:ietf:params:oauth:token-type:jwt"
_TIMEOUT_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 256 * 1024
_CODE: Final = re.compile(r"[A-Za-z_]{1,60}")
_OF_A_KEY: Final = (400, 401, 403)  # other statuses of a token endpoint say nothing about the key
_OF_A_FEDERATION: Final = frozenset(range(400, 500)) - {408, 425}


@dataclass(frozen=True, slots=True)
class AccessToken:
    """An OAuth 2.0 access token. ``expires_at`` is in seconds since the epoch; None if no expiry is known."""

    value: str = field(repr=False)
    expires_at: float | None


def tokens_of(uri: BucketUri, context: SourceContext) -> Refreshing[AccessToken] | None:
    """The tokens for a bucket; None reads anonymously. Blocking: reads and parses keys.

    Raises:
        InvalidRequestError: a sign-in of another cloud.
        SecretMalformedError: the secret is not a service account's key.
    """
    match context.sign_in:
        case Secret() as secret:
            return key_tokens(secret, str(uri), context)
        case GoogleServiceAccount() as account:
            return service_account_tokens(account, str(uri), context)
        case None:
            ambient = ambient_key(context)
            return None if ambient is None else key_tokens(ambient, str(uri), context)
        case _:
            raise InvalidRequestError(f"{uri} cannot be read with a role of AWS")


def ambient_key(context: SourceContext) -> Secret | None:
    """The process's own key, if it counts. Raises ``SecretMalformedError`` if it cannot be read. Blocking."""
    if not (context.ambient_credentials and context.settings.gcs_key_file):
        return None
    try:
        return Secret(_AMBIENT, Path(context.settings.gcs_key_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SecretMalformedError(_AMBIENT, "names a file that cannot be read") from None


def key_tokens(secret: Secret, source: str, context: SourceContext) -> Refreshing[AccessToken]:
    """Tokens of a service account, from its JSON key; ``source`` is for messages.

    Raises ``SecretMalformedError``: not a service account's key.
    """
    key = service_account_key(secret)
    url = key.token_url or context.settings.google_token_url
    if url != context.settings.google_token_url and not url.startswith("https://"):
        raise SecretMalformedError(secret.name, 'has a "token_uri" that is not an https address')
    document = {
        "type": "service_account",
        "client_email": key.client_email,
        "private_key": key.private_key,
        "private_key_id": key.private_key_id,
        "token_uri": url,
    }
    try:
        credentials = service_account.Credentials.from_service_account_info(document, scopes=[SCOPE])  # type: ignore[no-untyped-call]
    except (GoogleAuthError, AttributeError, TypeError, ValueError):
        raise SecretMalformedError(secret.name, 'has a "private_key" that is not a private key in PEM form') from None

    def denial(code: str, _: str) -> BdnError:
        reason = "the service account's key was revoked, the account is gone, or the clock of this machine is wrong"
        return AuthRequiredError(source, f"{code}: {reason}")

    refusal = partial(_refusal, source, _OF_A_KEY, denial)
    exchange = partial(asyncio.to_thread, _exchange, lambda: credentials, source, context, refusal)
    return Refreshing(lambda: context.asker.ask(url, exchange), context.clock, f"secret {secret.name}")


def service_account_tokens(
    sign_in: GoogleServiceAccount, source: str, context: SourceContext
) -> Refreshing[AccessToken]:
    """Tokens of a service account, for an identity token of this mirror.

    A refusal names the service that refused, and what to change.
    """
    url = context.settings.google_sts_url

    def credentials() -> Any:  # noqa: ANN401 - each exchange takes a fresh identity token
        account = f"{context.settings.google_iam_url}/v1/projects/-/serviceAccounts/{sign_in.email}"
        return identity_pool.Credentials(  # type: ignore[no-untyped-call]
            audience=sign_in.audience,
            subject_token_type=_JWT,
            token_url=url,
            subject_token_supplier=_Supplier(sign_in),
            service_account_impersonation_url=f"{account}:generateAccessToken",
            service_account_impersonation_options={"token_lifetime_seconds": TOKEN_SECONDS},
            scopes=[SCOPE],
        )

    refusal = partial(_refusal, source, _OF_A_FEDERATION, partial(_denial, sign_in, source))
    exchange = partial(asyncio.to_thread, _exchange, credentials, source, context, refusal)
    return Refreshing(lambda: context.asker.ask(url, exchange), context.clock, sign_in.email)


@dataclass(frozen=True)
class _Supplier(identity_pool.SubjectTokenSupplier):
    sign_in: GoogleServiceAccount

    def get_subject_token(self, context: object, request: object) -> str:  # noqa: ARG002 - the library's signature
        return self.sign_in.assertion.sign(self.sign_in.token_audience)


@dataclass(frozen=True, slots=True)
class GoogleAnswer:
    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)


def _exchange(
    credentials: Callable[[], Any],
    source: str,
    context: SourceContext,
    refusal: Callable[[GoogleAnswer, str], BdnError],
) -> AccessToken:
    egress, authorities = context.settings.egress, _authorities(context.settings.ca_bundle)
    with closing(ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS, egress=egress, authorities=authorities)) as pool:
        try:
            found = credentials()
            found.refresh(GoogleTransport(pool, source, refusal))
            expires_at = cast("datetime", found.expiry).replace(tzinfo=UTC)  # the library's datetimes are naive
            return AccessToken(str(found.token), expires_at.timestamp())
        except (GoogleAuthError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Not the cause: the library's own errors repeat what was received.
            reason = f"the answer does not look like Google's ({type(error).__name__})"
            raise UpstreamUnavailableError(source, reason) from None


@dataclass(frozen=True, slots=True)
class GoogleTransport:
    """A ``google.auth.transport.Request`` over our own connections, behind the egress guard. Blocking.

    A refusal becomes our error at once: the library would sleep, retry, and drop the status and ``Retry-After``.
    """

    connections: ConnectionPool
    source: str
    refusal: Callable[[GoogleAnswer, str], BdnError]  # maps an answer other than 200 from the URL

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        **_: object,
    ) -> GoogleAnswer:
        """Return the answer if its status is 200. A longer one is cut off, and then not JSON."""
        content = bytearray(_LONGEST_ANSWER)
        try:
            with self.connections.request(method, url, headers or {}, body) as response:
                size = response.fill(memoryview(content), StallPolicy())
                answer = GoogleAnswer(response.status, response.headers, bytes(content[:size]))
        except NETWORK_ERRORS as error:
            reason = f"{urlsplit(url).hostname} did not answer the request for a token ({type(error).__name__})"
            raise unreachable(self.source, reason, error) from None  # the error's text may repeat what was sent
        if answer.status != 200:
            raise self.refusal(answer, url)
        return answer


@cache
def _authorities(ca_bundle: str | None) -> Authorities:
    return Authorities(Path(ca_bundle) if ca_bundle else None)


def _refusal(
    source: str, denials: Collection[int], denial: Callable[[str, str], BdnError], answer: GoogleAnswer, url: str
) -> BdnError:
    """The error for an answer other than 200. Leaves out descriptions: they may repeat what was sent."""
    wait = parse_retry_after(answer.headers)
    if answer.status == 429:
        return UpstreamRateLimitedError(source, wait)
    code = _code_of(answer.data)
    if answer.status in denials:
        return denial(code or str(answer.status), url)
    said = f"{answer.status} {code or ''}".rstrip()
    return UpstreamUnavailableError(
        source, f"{urlsplit(url).hostname} answered {said} to the request for a token", wait
    )


def _denial(sign_in: GoogleServiceAccount, source: str, code: str, url: str) -> BdnError:
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
    return AuthRequiredError(source, f"{code}: {sign_in.provider} rejected this mirror's identity token", remedy)


def _code_of(content: bytes) -> str | None:
    """``invalid_grant`` of {"error": "invalid_grant"}, or ``PERMISSION_DENIED`` of {"error": {"status": …}}."""
    error = (json_object(content) or {}).get("error")
    code = error.get("status") if isinstance(error, dict) else error
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None
