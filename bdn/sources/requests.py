"""Requests of sources that need no client library: one attempt each, in a thread, behind the egress guard."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Headers
from bdn.net.http1.answer import Answer
from bdn.net.http1.pool import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.net.unreachable import unreachable
from bdn.sources.sign_in import SourceContext
from bdn.wire.http_fields import parse_retry_after

T = TypeVar("T")
_TIMEOUT_SECONDS: Final = 30.0


@dataclass(frozen=True)
class SourceRequests:
    """``source`` is for messages, which never contain an address: it may be signed."""

    source: str
    context: SourceContext
    connections: ConnectionPool

    async def ask(self, method: str, url: str, headers: Mapping[str, str], read: Callable[[Answer], T]) -> T:
        """Send the request and follow redirects; ``read`` gets the answer in a thread, whatever its status.

        Raises what ``read`` does, ``EgressRefusedError``, and ``UpstreamUnavailableError`` for a network failure.
        """
        place = [url]

        def once() -> T:
            try:
                with self.connections.following(method, url, headers, asked=place.append) as answer:
                    return read(answer)
            except NETWORK_ERRORS as error:
                # Not the cause: its message may contain an address.
                reason = f"{urlsplit(place[-1]).hostname}: {reason_of(error)}"
                raise unreachable(self.source, reason, error) from None

        return await self.context.asker.ask(url, lambda: asyncio.to_thread(once))


@asynccontextmanager
async def open_requests(source: str, context: SourceContext) -> AsyncIterator[SourceRequests]:
    """At the end, connections are closed and requests under way fail."""
    with closing(ConnectionPool(timeout_seconds=_TIMEOUT_SECONDS, egress=context.settings.egress)) as connections:
        yield SourceRequests(source, context, connections)


def refusal(source: str, said: str, status: int, headers: Headers, denial: str) -> BdnError:
    """Map a status that is not a success; ``said`` is the answer in words, ``denial`` explains a 401 or 403."""
    if status in (401, 403):
        return AuthRequiredError(source, f"{said}: {denial}")
    if status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(headers))
    if status in (408, 425) or status >= 500:
        return UpstreamUnavailableError(source, said, parse_retry_after(headers))
    return SourceNotFoundError(source, said)
