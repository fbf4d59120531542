"""What a failure of ``gcsfs`` means for the user."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.sources.bucket_source import NotAListingError
from bdn.wire.http_fields import parse_retry_after


@dataclass(eq=False)
class RefusedError(Exception):
    """An answer that is not 200. Neither aiohttp's nor gcsfs's error: those keep neither reason nor ``Retry-After``."""

    status: int
    reason: str  # Google's word for it, such as "rateLimitExceeded", or ""
    headers: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, status: int, body: bytes, headers: Mapping[str, str]) -> RefusedError:
        """From an error document of the JSON API; any other body tells no reason."""
        try:
            reason = json.loads(body)["error"]["errors"][0]["reason"]
        except (ValueError, LookupError, TypeError, RecursionError):
            reason = ""
        # It stands in messages, and a server that is not Google's may say anything.
        return cls(status, reason if isinstance(reason, str) and _WORD.fullmatch(reason) else "", headers)


_WORD: Final = re.compile(r"[A-Za-z]{1,40}")
# After aiohttp's and OSError, for timeouts and resets: how an answer that is not Google's fails to be read.
SDK_ERRORS: Final = (
    RefusedError,
    aiohttp.ClientError,
    OSError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_SLOW_DOWN: Final = ("quotaExceeded", "rateLimitExceeded", "userRateLimitExceeded")  # also told with status 403


def translate(error: Exception, source: str, *, anonymous: bool) -> BdnError:
    """Our error for one of ``SDK_ERRORS``. The client's own text stays out of it: it may hold addresses and tokens."""
    match error:
        case RefusedError():
            return _refused(error, source, anonymous=anonymous)
        case aiohttp.ClientError() | OSError():
            where = f" at {error.host}" if isinstance(error, aiohttp.ClientConnectorError) else ""
            return UpstreamUnavailableError(source, f"GCS{where} could not be asked ({type(error).__name__})")
        case NotAListingError():
            return UpstreamUnavailableError(source, str(error))
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like GCS's ({type(error).__name__})")


def _refused(error: RefusedError, source: str, *, anonymous: bool) -> BdnError:
    status = error.status
    answer = f"{status} {error.reason}".rstrip()
    wait = parse_retry_after(error.headers)
    if status == 429 or error.reason in _SLOW_DOWN:
        return UpstreamRateLimitedError(source, wait)
    if status in (401, 403):
        return AuthRequiredError(source, f"{answer}: {_denial(status, anonymous=anonymous)}")
    if status == 404:
        return SourceNotFoundError(source, "the bucket does not exist")
    if status == 400:
        reason = "GCS cannot have a bucket or prefix of this name"
        if error.reason == "userProjectMissing":
            reason = "whoever reads this bucket pays for it, and BDN has no project to bill"
        return InvalidSourceError(source, f"{source}: {reason} ({answer})")
    return UpstreamUnavailableError(source, f"GCS answered {answer}", wait)


def _denial(status: int, *, anonymous: bool) -> str:
    if anonymous:
        return "anonymous reading is not allowed"
    if status == 401:
        return "the access token is not valid"
    return (
        "these credentials may not list it; they need storage.objects.list and storage.objects.get, "
        "as in the role Storage Object Viewer"
    )
