"""What a failure of ``huggingface_hub`` means for the user."""

from dataclasses import dataclass
from typing import Final

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.errors import RevisionNotFoundError as HubRevisionNotFoundError

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    GatedSourceError,
    InvalidSourceError,
    RevisionNotFoundError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import HuggingFaceUri
from bdn.sources.huggingface.session import HubUnreachableError
from bdn.wire.http_fields import parse_retry_after

# The last five are how the SDK fails on an answer that is not a hub's, such as a proxy's HTML page with status 200.
SDK_ERRORS: Final = (
    HubUnreachableError,
    OfflineModeIsEnabled,
    httpx2.HTTPError,
    httpx2.InvalidURL,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class HubErrors:
    """Maps the SDK's errors to ours, for one source; ``anonymous`` is whether we came without a token."""

    uri: HuggingFaceUri
    anonymous: bool

    def translate(self, error: Exception, path: str) -> BdnError:
        """Our error for one of ``SDK_ERRORS``, met while asking for ``path`` (empty: for the repository)."""
        source = str(self.uri)
        match error:
            # Subclasses first: to the SDK, a gated repository is also one that was not found.
            case GatedRepoError():
                return AuthRequiredError(source, "it is gated") if self.anonymous else GatedSourceError(source)
            case DisabledRepoError():
                return SourceNotFoundError(source, "the hub has disabled it")
            case HubRevisionNotFoundError():
                return RevisionNotFoundError(source, self.uri.revision or "the default branch")
            case RemoteEntryNotFoundError():
                return SourceChangedError(source, path, "the hub no longer has it")
            case HfHubHTTPError():
                return self._refused(error, error.response.status_code)
            case _:
                return self._failed(error)

    def _refused(self, error: HfHubHTTPError, status: int) -> BdnError:
        source, answer = str(self.uri), f"the hub answered {status}: {_said(error)}"
        if status == 401:
            # The hub does not tell strangers whether a private repository exists.
            hidden = "the hub answered 401: it does not exist, or it is private"
            return AuthRequiredError(source, hidden if self.anonymous else f"the token is not valid: {answer}")
        if isinstance(error, RepositoryNotFoundError):
            hidden = "is private and needs a secret" if self.anonymous else "is hidden from the account of this token"
            return SourceNotFoundError(source, f"it does not exist, or it {hidden}")
        if status == 403:
            return AuthRequiredError(source, answer)
        if status == 429:
            return UpstreamRateLimitedError(source, parse_retry_after(error.response.headers))
        if status == 408 or status >= 500:
            return UpstreamUnavailableError(source, answer, parse_retry_after(error.response.headers))
        return SourceNotFoundError(source, answer)

    def _failed(self, error: Exception) -> BdnError:
        source = str(self.uri)
        if isinstance(error, HFValidationError):
            return InvalidSourceError(source, f"{source}: no hub has a repository of this name")
        if isinstance(error, (HubUnreachableError, OfflineModeIsEnabled, httpx2.HTTPError, httpx2.InvalidURL)):
            return UpstreamUnavailableError(source, f"the hub could not be asked ({error})")
        return UpstreamUnavailableError(source, f"the answer does not look like a hub's ({type(error).__name__})")


def _said(error: HfHubHTTPError) -> str:
    """The hub's own first line, shortened. The SDK's message is left out: it holds addresses and advice for its users."""
    return (error.server_message or error.response.reason_phrase).partition("\n")[0][:200]
