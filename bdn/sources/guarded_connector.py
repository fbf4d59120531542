"""aiohttp connections behind the egress guard, for the clients of AWS and gcsfs."""

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
    """Refuses hosts with a refused address. Made inside a running loop."""

    def __init__(self, policy: EgressPolicy) -> None:
        self.policy: Final = policy
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host, all allowed. A proxy's are not checked: the operator named the proxy."""
        found = await self._system.resolve(host, port, family)
        if not _by_proxy.get():
            self.policy.admit_resolved(host, (result["host"] for result in found))
        return found

    async def close(self) -> None:
        await self._system.close()


class GuardedConnector(TCPConnector):
    """Checks every request and every redirect, and connects only to addresses that the resolver has checked.

    aiohttp calls no resolver for a literal address, so the host of each request is checked as written before that.
    Resolved names are not cached: requests through a proxy skip the check, and direct requests would reuse their
    addresses unchecked.
    """

    def __init__(self, resolver: GuardedResolver, **options: Any) -> None:  # noqa: ANN401 - aiohttp's own
        self._policy = resolver.policy
        super().__init__(resolver=resolver, **{**options, "use_dns_cache": False})

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:  # noqa: ASYNC109
        """A connection for one request, pooled or new.

        Raises ``EgressRefusedError``: the request's host is refused; nothing was sent.
        """
        self._policy.admit(req.url.raw_host or "")
        token = _by_proxy.set(req.proxy is not None)
        try:
            return await super().connect(req, traces, timeout)
        finally:
            _by_proxy.reset(token)


def guarded_connector(policy: EgressPolicy, **options: Any) -> GuardedConnector:  # noqa: ANN401 - aiohttp's own
    """For ``aiohttp.ClientSession(connector=…)``. Made inside a running loop, closed by the session."""
    return GuardedConnector(GuardedResolver(policy), **options)


def proxy_for(url: str) -> str | None:
    """The proxy for this address; None connects directly."""
    parts = urlsplit(url)
    return https_proxy(parts.hostname or "") if parts.scheme == "https" else None
