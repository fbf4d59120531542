"""The connections of aiohttp, behind the egress guard: for the S3 client, gcsfs, and token endpoints."""

import socket
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import ClientRequest, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.resolver import ThreadedResolver
from aiohttp.tracing import Trace

from bdn.core.egress import EgressPolicy
from bdn.net.http1.pool import https_proxy

_by_proxy: Final[ContextVar[bool]] = ContextVar("_by_proxy", default=False)


class GuardedResolver(AbstractResolver):
    """Resolves names, and refuses those with an address that is refused. Made inside a running loop."""

    def __init__(self, policy: EgressPolicy) -> None:
        self.policy: Final = policy
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host, all of them allowed. A proxy's are not judged: the operator named it."""
        found = await self._system.resolve(host, port, family)
        if not _by_proxy.get():
            self.policy.admit_resolved(host, (result["host"] for result in found))
        return found

    async def close(self) -> None:
        """Nothing is open between questions."""
        await self._system.close()


class GuardedConnector(TCPConnector):
    """aiohttp's connector, which every request and every redirect passes; it connects to what the resolver has checked.

    aiohttp asks no resolver for an address, so the host of each request is judged as it is written before that. Nothing is
    kept of an answer to a name: with a cache, requests by way of a proxy and others would share it unjudged.
    """

    def __init__(self, resolver: GuardedResolver, **options: Any) -> None:  # noqa: ANN401 - aiohttp's own
        self._policy = resolver.policy
        super().__init__(resolver=resolver, **{**options, "use_dns_cache": False})

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:  # noqa: ASYNC109
        """A connection for one request, of the pool or new.

        Raises ``EgressRefusedError``: the request's host is refused; nothing was sent.
        """
        self._policy.admit(req.url.raw_host or "")
        token = _by_proxy.set(req.proxy is not None)
        try:
            return await super().connect(req, traces, timeout)
        finally:
            _by_proxy.reset(token)


def guarded_connector(policy: EgressPolicy, **options: Any) -> GuardedConnector:  # noqa: ANN401 - aiohttp's own
    """A connector for ``aiohttp.ClientSession(connector=…)``; made inside a running loop, closed by the session."""
    return GuardedConnector(GuardedResolver(policy), **options)


def proxy_for(url: str) -> str | None:
    """The proxy for this address; None is a direct connection."""
    parts = urlsplit(url)
    return https_proxy(parts.hostname or "") if parts.scheme == "https" else None
