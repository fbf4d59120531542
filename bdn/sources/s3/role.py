"""Keys of S3 for an hour: a role of a user's AWS account, taken at STS and taken again before the hour is over.

Only what is passed in counts: the machine's AWS profiles, files and roles are left alone.
"""

import time
from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Final, TypedDict
from xml.etree import ElementTree as ET

from aiobotocore.config import AioConfig
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidRequestError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import ASK_ONCE, Asker
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.client import aws_session, guarded_options
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import AWS_AUDIENCE, AwsAssumedRole, AwsWebIdentity, S3Credentials
from bdn.wire.http_fields import parse_retry_after

SESSION_SECONDS: Final = 3600  # what every role allows, and all that a role taken with another role's keys may have


class _RoleKeys(TypedDict):
    AccessKeyId: str
    SecretAccessKey: str
    SessionToken: str
    Expiration: datetime


class AwsRoleCredentials:
    """A provider of S3 credentials (see there). The first request is made by the first ``get``.

    Args:
        sign_in: the role, and with what it is taken.
        source: what is read with it, for messages.
        settings: where STS is, and this mirror's own keys, which AWS_ASSUME_ROLE signs with.
        clock: seconds since the epoch.
        asker: sends the requests.
    """

    def __init__(
        self,
        sign_in: AwsWebIdentity | AwsAssumedRole,
        source: str,
        settings: UpstreamSettings,
        *,
        clock: Callable[[], float] = time.time,
        asker: Asker = ASK_ONCE,
    ) -> None:
        if isinstance(sign_in, AwsAssumedRole) and settings.s3_credentials is None:
            raise InvalidRequestError(
                "AWS_ASSUME_ROLE needs AWS keys of this mirror's own, and it has none: the operator sets AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY"
            )
        self._sign_in = sign_in
        self._source = source
        self._settings = settings
        self._refreshing = Refreshing(self._ask, clock, sign_in.role.arn)
        self._asker = asker

    async def get(self) -> S3Credentials:
        """The keys to use now.

        Raises:
            AuthRequiredError: the role cannot be taken; says what to change, and where.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later.
        """
        return await self._refreshing.get()

    async def _ask(self) -> S3Credentials:
        # The address is for the budget of requests; the client knows the names of other partitions.
        url = self._settings.sts_endpoint_url or f"https://sts.{self._sign_in.role.region}.amazonaws.com"
        return await self._asker.ask(url, self._take_role)

    async def _take_role(self) -> S3Credentials:
        sign_in, role = self._sign_in, self._sign_in.role
        request = {"RoleArn": role.arn, "RoleSessionName": role.session_name, "DurationSeconds": SESSION_SECONDS}
        try:
            async with self._client() as sts:
                sts.meta.events.register("before-parse.sts", keep_status)
                if isinstance(sign_in, AwsAssumedRole):
                    answer = await sts.assume_role(**request, ExternalId=sign_in.external_id)
                else:
                    token = sign_in.assertion.sign(AWS_AUDIENCE)
                    answer = await sts.assume_role_with_web_identity(**request, WebIdentityToken=token)
            keys: _RoleKeys = answer["Credentials"]
            return S3Credentials(
                keys["AccessKeyId"],
                keys["SecretAccessKey"],
                keys["SessionToken"],
                role.region,
                keys["Expiration"].timestamp(),
            )
        except SDK_ERRORS as error:
            # Not the cause: the client's own errors repeat what was sent and received.
            raise translate(error, sign_in, self._source) from None

    def _client(self) -> AbstractAsyncContextManager[Any]:
        """A client of STS, with keys of our own only where these take the role."""
        own = self._settings.s3_credentials if isinstance(self._sign_in, AwsAssumedRole) else None
        config = AioConfig(
            signature_version="v4" if own else UNSIGNED,
            ignore_configured_endpoint_urls=True,
            connect_timeout=10,
            read_timeout=30,
            retries={"total_max_attempts": 1, "mode": "standard"},
            **guarded_options(self._settings.egress),
        )
        client: AbstractAsyncContextManager[Any] = aws_session().create_client(
            "sts",
            region_name=self._sign_in.role.region,
            endpoint_url=self._settings.sts_endpoint_url,
            verify=self._settings.ca_bundle,
            aws_access_key_id=own and own.access_key_id,
            aws_secret_access_key=own and own.secret_access_key,
            aws_session_token=own and own.session_token,
            config=config,
        )
        return client


# The last three are how an answer that is not STS's fails to be read; OSError covers timeouts and what aiohttp lets through.
SDK_ERRORS: Final = (
    BotoCoreError,
    ClientError,
    ResponseParserError,
    OSError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)
_UNREADABLE: Final = b"<ErrorResponse><Error><Code>Unknown</Code></Error></ErrorResponse>"

_SLOW_DOWN: Final = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")
_OWN_KEYS: Final = {
    "InvalidClientTokenId": "the access key does not exist",
    "UnrecognizedClientException": "the access key does not exist",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "IncompleteSignature": "the secret access key is wrong",
    "ExpiredToken": "the session token has expired",
    "ExpiredTokenException": "the session token has expired",
    "RequestExpired": "the clock of this mirror is wrong",
}


def keep_status(response_dict: MutableMapping[str, Any], **_: object) -> None:
    """A hook of the client (``before-parse``): from a refusal without XML, as gateways send, it would not tell the status."""
    if response_dict["status_code"] >= 300:
        try:
            ET.fromstring(response_dict["body"])  # noqa: S314 - as the client does next
        except ET.ParseError:
            response_dict["body"] = _UNREADABLE


def translate(error: Exception, sign_in: AwsWebIdentity | AwsAssumedRole, source: str) -> BdnError:
    """Our error for one of ``SDK_ERRORS``. The client's own text stays out of it: it may hold tokens and keys."""
    match error:
        case ClientError():
            return _answered(error, sign_in, source)
        case BotoCoreError() | OSError():
            return UpstreamUnavailableError(source, f"AWS STS could not be asked ({type(error).__name__})")
        case _:
            return UpstreamUnavailableError(
                source, f"the answer does not look like that of AWS STS ({type(error).__name__})"
            )


def _answered(error: ClientError, sign_in: AwsWebIdentity | AwsAssumedRole, source: str) -> BdnError:
    metadata = error.response.get("ResponseMetadata", {})
    status, headers = int(metadata.get("HTTPStatusCode", 0)), metadata.get("HTTPHeaders", {})
    code = str(error.response.get("Error", {}).get("Code", "Unknown"))
    if code in _SLOW_DOWN or status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if not 400 <= status < 500:
        return UpstreamUnavailableError(source, f"AWS STS answered {status} {code}")
    role = sign_in.role
    if code == "RegionDisabledException":
        remedy = f"Activate STS in {role.region} in account {role.account}, or name another region in auth"
        return AuthRequiredError(source, f"{code}: STS is not active in {role.region}", remedy)
    if isinstance(sign_in, AwsAssumedRole):
        return _of_own_keys(code, sign_in, source)
    return _of_web_identity(code, sign_in, source)


def _of_own_keys(code: str, sign_in: AwsAssumedRole, source: str) -> BdnError:
    if problem := _OWN_KEYS.get(code):
        remedy = "The operator looks at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of this mirror"
        return AuthRequiredError(source, f"{code} for this mirror's own AWS keys: {problem}", remedy)
    remedy = (
        "The role's trust policy has to allow sts:AssumeRole to this mirror's AWS principal (ask its operator for it) with "
        f'the condition "StringEquals": {{"sts:ExternalId": "{sign_in.external_id}"}}, and the role has to exist'
    )
    return AuthRequiredError(source, f"{code}: {sign_in.role.arn} cannot be assumed", remedy)


def _of_web_identity(code: str, sign_in: AwsWebIdentity, source: str) -> BdnError:
    role, assertion = sign_in.role, sign_in.assertion
    reason = f"{code}: {role.arn} cannot be assumed with this mirror's identity token"
    host = assertion.issuer.removeprefix("https://")
    match code:
        case "IDPCommunicationError":
            return UpstreamUnavailableError(
                source, f"AWS STS cannot read the public keys of {assertion.issuer} ({code})"
            )
        case "ExpiredTokenException" | "ExpiredToken":
            remedy = "The token was made just now, so the clock of this mirror is wrong: the operator sets it right"
        case "InvalidIdentityToken" | "IDPRejectedClaim":
            remedy = (
                f"In IAM of account {role.account}, add the OpenID Connect provider {assertion.issuer} with the audience "
                f"{AWS_AUDIENCE}; AWS has to reach {assertion.issuer}/.well-known/openid-configuration from the internet"
            )
        case _:
            remedy = (
                "The role has to exist, and its trust policy has to allow sts:AssumeRoleWithWebIdentity to "
                f"{role.provider_arn(assertion.issuer)}, where {host}:aud is {AWS_AUDIENCE} and {host}:sub is "
                f"like {assertion.subjects}"
            )
    return AuthRequiredError(source, reason, remedy)
