"""Who reads a bucket of Google, in the only form that its requests need: a token, and until when it is good."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from bdn.core.errors import BdnError, UpstreamUnavailableError
from bdn.sources.guarded_connector import guarded_connector, proxy_for
from bdn.sources.settings import UpstreamSettings


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


_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, connect=10)
_LONGEST_ANSWER: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class GoogleAnswer:
    """An answer as google-auth wants it (``google.auth.transport.Response``)."""

    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GoogleTransport:
    """``google.auth.transport.Request``.

    A refusal is our error at once: the library would ask again, after sleeping, and forget status and ``Retry-After``.

    Args:
        session: asks.
        loop: where it asks.
        source: what is read with the token, for messages.
        refusal: the error for an answer other than 200 from this address.
    """

    session: aiohttp.ClientSession
    loop: asyncio.AbstractEventLoop
    source: str
    refusal: Callable[[GoogleAnswer, str], BdnError]

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        **_: object,
    ) -> GoogleAnswer:
        """The answer, when its status is 200. Blocking; not called on the event loop."""
        asking = self._ask(url, method, body, dict(headers or {}))
        return asyncio.run_coroutine_threadsafe(asking, self.loop).result()

    async def _ask(self, url: str, method: str, body: bytes | None, headers: dict[str, str]) -> GoogleAnswer:
        content = bytearray()
        try:
            async with self.session.request(
                method, url, data=body, headers=headers, allow_redirects=False, proxy=proxy_for(url)
            ) as response:
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > _LONGEST_ANSWER:
                        break  # cut, it is no JSON
                answer = GoogleAnswer(response.status, response.headers, bytes(content))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"{urlsplit(url).hostname} could not be asked for a token ({type(error).__name__})"
            raise UpstreamUnavailableError(self.source, reason) from None  # its text may repeat what was sent
        if answer.status != 200:
            raise self.refusal(answer, url)
        return answer


@asynccontextmanager
async def google_transport(
    settings: UpstreamSettings, source: str, refusal: Callable[[GoogleAnswer, str], BdnError]
) -> AsyncIterator[GoogleTransport]:
    """A transport whose connections are closed at the end."""
    tls = await asyncio.to_thread(_authorities, settings.ca_bundle)
    connector = guarded_connector(settings.egress, ssl=tls)
    async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
        yield GoogleTransport(session, asyncio.get_running_loop(), source, refusal)


@cache
def _authorities(ca_bundle: str | None) -> ssl.SSLContext:
    """Read once: it takes a tenth of a second."""
    return ssl.create_default_context(cafile=ca_bundle)
