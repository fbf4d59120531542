"""What a failure of AWS STS means for the user and for the operator: which trust policy to change, and how."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final
from xml.etree import ElementTree as ET

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from bdn.core.errors import AuthRequiredError, BdnError, UpstreamRateLimitedError, UpstreamUnavailableError
from bdn.sources.sign_in import AWS_AUDIENCE, AwsAssumedRole, AwsWebIdentity
from bdn.wire.http_fields import parse_retry_after

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
