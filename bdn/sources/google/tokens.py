"""Who reads a bucket of Google, in the only form that its requests need: a token, and until when it is good."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


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
