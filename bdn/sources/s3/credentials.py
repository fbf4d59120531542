"""Credentials for buckets of S3, R2 and CoreWeave: anonymous, keys, or a role of a user's AWS account.

STS issues the keys of a role for an hour; they are renewed before that. Only credentials that are passed in count: the
machine's AWS profiles, files and roles are ignored.
"""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from xml.etree import ElementTree as ET

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidRequestError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import BucketUri
from bdn.net.unreachable import unreachable
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.answers import facts_of
from bdn.sources.s3.client import S3Endpoint, aws_session, guarded_config
from bdn.sources.settings import DEFAULT_REGION, S3Credentials, UpstreamSettings, account_address
from bdn.sources.sign_in import AWS_AUDIENCE, AwsAssumedRole, AwsWebIdentity, Secret, SourceContext, s3_credentials
from bdn.wire.http_fields import parse_retry_after

SESSION_SECONDS: Final = 3600  # allowed by every role, and the limit of role chaining
_AWS: Final = "aws"  # in identities, for every region: names of buckets are unique across regions
_R2_REGION: Final = "auto"  # the only one that R2 has

AwsSignIn = AwsWebIdentity | AwsAssumedRole


def endpoint_of(uri: BucketUri, context: SourceContext) -> S3Endpoint:
    """The bucket's endpoint, and the credentials to read it.

    Raises:
        InvalidRequestError: a sign-in of another cloud.
        SecretMalformedError: the secret does not contain keys.
    """
    settings, is_aws = context.settings, uri.scheme == "s3"
    credentials: Refreshing[S3Credentials] | None = None
    region: str | None = None
    match context.sign_in:
        case Secret() as secret:
            keys = s3_credentials(secret)
            credentials, region = fixed_keys(keys, context.clock), keys.region
        case None if uri.scheme == "r2":
            credentials = _no_keys(str(uri), context.clock)
        case AwsWebIdentity() | AwsAssumedRole() as sign_in if is_aws:
            credentials, region = role_credentials(sign_in, str(uri), context), sign_in.role.region
        # The process's own AWS keys are not for other clouds.
        case None if is_aws and context.ambient_credentials and settings.s3_credentials:
            credentials, region = fixed_keys(settings.s3_credentials, context.clock), settings.s3_credentials.region
        case None:
            pass
        case _:
            others = "a service account of Google" if is_aws else "a role of AWS or a service account of Google"
            raise InvalidRequestError(f"{uri} cannot be read with {others}")
    if uri.scheme == "cw":  # which refuses buckets in the path
        address = settings.cw_endpoint_url
        return S3Endpoint(address, region or DEFAULT_REGION, credentials, ("cw", address), "virtual")
    if uri.scheme == "r2":
        address = account_address(settings.r2_endpoint_url, uri.account, uri.jurisdiction)
        return S3Endpoint(address, _R2_REGION, credentials, ("r2", address, uri.account, uri.jurisdiction))
    url = settings.s3_endpoint_url
    return S3Endpoint(
        url,
        region or settings.s3_region,
        credentials,
        ("s3", url or _AWS),
        settings.s3_addressing,
        settings.s3_requester_pays,
    )


def fixed_keys(keys: S3Credentials, clock: Callable[[], float]) -> Refreshing[S3Credentials]:
    async def get() -> S3Credentials:
        return keys

    return Refreshing(get, clock, "fixed keys")


def _no_keys(source: str, clock: Callable[[], float]) -> Refreshing[S3Credentials]:
    """R2 serves objects of public buckets without keys, but at other addresses, and never their listing."""

    async def get() -> S3Credentials:
        raise AuthRequiredError(source, "R2 lists buckets for the owners of keys only, public ones too")

    return Refreshing(get, clock, source)


def role_credentials(sign_in: AwsSignIn, source: str, context: SourceContext) -> Refreshing[S3Credentials]:
    """The keys of a role; ``source`` is for messages.

    Its ``get`` raises ``AuthRequiredError`` if the role cannot be assumed, with what to change, and where.

    Raises ``InvalidRequestError``: this mirror has no keys to assume the role with.
    """
    settings, role = context.settings, sign_in.role
    if isinstance(sign_in, AwsAssumedRole) and settings.s3_credentials is None:
        raise InvalidRequestError(
            "AWS_ASSUME_ROLE needs AWS keys of this mirror's own, and it has none: the operator has to set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        )

    async def ask() -> S3Credentials:
        # The address is for the request budget; the client knows the names of other partitions.
        url = settings.sts_endpoint_url or f"https://sts.{role.region}.amazonaws.com"
        return await context.asker.ask(url, lambda: _take_role(sign_in, source, settings))

    return Refreshing(ask, context.clock, role.arn)


async def _take_role(sign_in: AwsSignIn, source: str, settings: UpstreamSettings) -> S3Credentials:
    role = sign_in.role
    request = {"RoleArn": role.arn, "RoleSessionName": role.session_name, "DurationSeconds": SESSION_SECONDS}
    try:
        async with _sts_client(sign_in, settings) as sts:
            sts.meta.events.register("before-parse.sts", keep_status)
            if isinstance(sign_in, AwsAssumedRole):
                answer = await sts.assume_role(**request, ExternalId=sign_in.external_id)
            else:
                token = sign_in.assertion.sign(AWS_AUDIENCE)
                answer = await sts.assume_role_with_web_identity(**request, WebIdentityToken=token)
        keys = answer["Credentials"]
        return S3Credentials(
            keys["AccessKeyId"],
            keys["SecretAccessKey"],
            keys["SessionToken"],
            role.region,
            keys["Expiration"].timestamp(),
        )
    except SDK_ERRORS as error:
        # Not the cause: the client's own errors repeat what was sent and received.
        raise translate(error, sign_in, source) from None


def _sts_client(sign_in: AwsSignIn, settings: UpstreamSettings) -> AbstractAsyncContextManager[Any]:
    """A client with our own keys only if these assume the role."""
    own = settings.s3_credentials if isinstance(sign_in, AwsAssumedRole) else None
    client: AbstractAsyncContextManager[Any] = aws_session().create_client(
        "sts",
        region_name=sign_in.role.region,
        endpoint_url=settings.sts_endpoint_url,
        verify=settings.ca_bundle,
        aws_access_key_id=own and own.access_key_id,
        aws_secret_access_key=own and own.secret_access_key,
        aws_session_token=own and own.session_token,
        config=guarded_config(settings.egress, "v4" if own else None, read_timeout=30),
    )
    return client


# The last three are what an answer that is not from STS raises when it is parsed; OSError covers timeouts and what
# aiohttp passes on.
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
    """Hook of the client (``before-parse``): keeps the status of a refusal without XML, as gateways send it."""
    if response_dict["status_code"] >= 300:
        try:
            ET.fromstring(response_dict["body"])  # noqa: S314 - as the client does next
        except ET.ParseError:
            response_dict["body"] = _UNREADABLE


def translate(error: Exception, sign_in: AwsSignIn, source: str) -> BdnError:
    """Map one of ``SDK_ERRORS`` to our error, without the client's own text: it may contain tokens and keys."""
    match error:
        case ClientError():
            return _answered(error, sign_in, source)
        case BotoCoreError() | OSError():
            return unreachable(source, f"AWS STS did not answer ({type(error).__name__})", error)
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like AWS STS's ({type(error).__name__})")


def _answered(error: ClientError, sign_in: AwsSignIn, source: str) -> BdnError:
    code, status, headers = facts_of(error)
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
        remedy = (
            "The operator has to check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of this mirror"
        )
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
            remedy = "The token was made just now, so the clock of this mirror is wrong: the operator has to correct it"
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
