"""Why a request reached no upstream, as the error that says whether asking again can help."""

import socket
import ssl
from collections.abc import Iterator
from typing import Final

from bdn.core.errors import UpstreamUnavailableError

_NO_SUCH_NAME: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class UpstreamUntrustedError(UpstreamUnavailableError):
    """No known authority signed the certificate of the server, or the server redirects to plain http. Another request fails in the same way."""

    transient = False


class UpstreamHostUnknownError(UpstreamUnavailableError):
    """The resolver says that the host does not exist, which passes only where the resolver is starting."""

    is_brief = True


def unreachable(source: str, reason: str, error: BaseException) -> UpstreamUnavailableError:
    """For a failure of the network, whatever client met it: the failure underneath decides. ``reason`` holds no address that is signed."""
    for cause in _causes(error):
        # Not aiohttp's error of the same class, which has no message of its own.
        if isinstance(cause, ssl.SSLCertVerificationError) and hasattr(cause, "verify_message"):
            remedy = f"{cause.verify_message}; SSL_CERT_FILE has to name a file with the authority that signed its certificate"
            return UpstreamUntrustedError(source, f"{reason}: {remedy}")
        if isinstance(cause, socket.gaierror) and cause.errno in _NO_SUCH_NAME:
            return UpstreamHostUnknownError(
                source, f"{reason}: the host does not exist, or has no address; correct its name"
            )
    return UpstreamUnavailableError(source, reason)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
