"""Maps network failures to upstream errors, which say whether a retry can help."""

import socket
import ssl
from collections.abc import Iterator
from typing import Final

from bdn.core.errors import UpstreamUnavailableError
from bdn.net.http1.connection import DowngradeError

_NO_SUCH_NAME: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class UpstreamUntrustedError(UpstreamUnavailableError):
    """Untrusted certificate, or a redirect to plain http. A retry fails again."""

    transient = False


class UpstreamHostUnknownError(UpstreamUnavailableError):
    """The resolver reports an unknown host. A retry helps only while the resolver is starting."""

    is_brief = True


def unreachable(source: str, reason: str, error: BaseException) -> UpstreamUnavailableError:
    """Map a network failure of any client by its root cause. ``reason`` must not contain a signed address."""
    if isinstance(error, DowngradeError):
        return UpstreamUntrustedError(source, reason)
    for cause in _causes(error):
        # Not aiohttp's error of the same class, which has no ``verify_message``.
        if isinstance(cause, ssl.SSLCertVerificationError) and hasattr(cause, "verify_message"):
            remedy = (
                f"{cause.verify_message}; set SSL_CERT_FILE to a file with the authority that signed its certificate"
            )
            return UpstreamUntrustedError(source, f"{reason}: {remedy}")
        if isinstance(cause, socket.gaierror) and cause.errno in _NO_SUCH_NAME:
            return UpstreamHostUnknownError(
                source, f"{reason}: the host does not exist or has no address; correct its name"
            )
    return UpstreamUnavailableError(source, reason)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
