"""What a failure of the S3 client means for the user."""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.wire.http_fields import parse_retry_after


# The last three are how an answer that is not S3's fails to be read; OSError covers timeouts and what aiohttp lets through.
class NotAListingError(ValueError):
    """The answer is something else than a listing; the text tells what, without any of its content."""


SDK_ERRORS: Final = (BotoCoreError, ClientError, OSError, KeyError, TypeError, ValueError)

_BAD_CREDENTIALS: Final = {
    "InvalidAccessKeyId": "the access key does not exist",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}
_OTHER_REGION: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_OTHER_REGION_STATUSES: Final = (301, 302, 307)
_REGION: Final = re.compile(r"[a-z]{2,12}(?:-[a-z0-9]{1,20}){1,4}")  # it becomes part of a host's name
_SLOW_DOWN: Final = ("RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests")


def translate(error: Exception, source: str, *, anonymous: bool) -> BdnError:
    """Our error for one of ``SDK_ERRORS``. The client's own text stays out of it: it may hold addresses and keys."""
    match error:
        case ClientError():
            return _answered(error, source, anonymous=anonymous)
        case ParamValidationError():
            return InvalidSourceError(source, f"{source}: S3 cannot have a bucket of this name")
        case BotoCoreError() | OSError():
            return UpstreamUnavailableError(source, f"S3{_where(error)} could not be asked ({type(error).__name__})")
        case NotAListingError():
            return UpstreamUnavailableError(source, str(error))
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like S3's ({type(error).__name__})")


def translate_head(error: Exception, source: str, path: str, *, anonymous: bool) -> BdnError:
    """The same for a HEAD of a listed object, whose failures have a status and no code."""
    if not isinstance(error, ClientError):
        return translate(error, source, anonymous=anonymous)
    _, status, headers = _facts(error)
    if status == 412:
        return SourceChangedError(source, path, "its ETag is another one")
    if status in (404, 405, 410):  # 405: the version is a mark that it was deleted
        return SourceChangedError(source, path, "it is gone")
    if status == 503:  # "Slow Down", in most cases
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status == 400:
        reason = f"{path}: status 400, which stands for expired credentials, and for objects under a key of their owner's own"
        return AuthRequiredError(source, f"{reason} (SSE-C), which cannot be read")
    return translate(error, source, anonymous=anonymous)


def region_told(error: ClientError) -> str | None:
    """The region that S3 sends us to, where that is the reason of the failure."""
    code, status, headers = _facts(error)
    if code not in _OTHER_REGION and status not in (*_OTHER_REGION_STATUSES, 400):
        return None
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    return region if isinstance(region, str) and _REGION.fullmatch(region) else None


def _answered(error: ClientError, source: str, *, anonymous: bool) -> BdnError:
    code, status, headers = _facts(error)
    if code in _OTHER_REGION or status in _OTHER_REGION_STATUSES:
        return InvalidSourceError(source, f'{source} lies in another region ({code}); add "aws_region" to the secret')
    if code in _BAD_CREDENTIALS:
        return AuthRequiredError(source, f"{code}: {_BAD_CREDENTIALS[code]}")
    if status in (401, 403):
        who = "anonymous reading is not allowed" if anonymous else "these credentials may not read it"
        return AuthRequiredError(source, f"{code}: {who}")
    if code in _SLOW_DOWN or status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status >= 500:
        return UpstreamUnavailableError(source, f"S3 answered {status} {code}", parse_retry_after(headers))
    reason = "the bucket does not exist" if code == "NoSuchBucket" else f"S3 answered {status} {code}"
    return SourceNotFoundError(source, reason)


def _where(error: BotoCoreError | OSError) -> str:
    """The host, where the client's error keeps the address: a name that does not resolve is somebody's to mend."""
    address = error.kwargs.get("endpoint_url") if isinstance(error, BotoCoreError) else None
    return f" at {urlsplit(address).hostname}" if isinstance(address, str) else ""


def _facts(error: ClientError) -> tuple[str, int, Mapping[str, str]]:
    metadata = error.response.get("ResponseMetadata", {})
    code = str(error.response.get("Error", {}).get("Code", "Unknown"))
    return code, int(metadata.get("HTTPStatusCode", 0)), metadata.get("HTTPHeaders", {})
