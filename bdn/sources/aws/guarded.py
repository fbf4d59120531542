"""The HTTP sessions of aiobotocore's clients (S3, R2, STS), behind the egress guard."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypedDict

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession, _ProxySSLTCPConnector
from botocore.awsrequest import AWSPreparedRequest
from botocore.exceptions import HTTPClientError

from bdn.core.errors import EgressRefusedError
from bdn.sources.guarded_connector import GuardedConnector, GuardedResolver

# Looked up when this is imported: a version of the client without it must not start, rather than go out unguarded.
_MAKES_CONNECTORS: Final = AIOHTTPSession._create_connector  # noqa: SLF001


class GuardedOptions(TypedDict):
    """Arguments of ``AioConfig``."""

    http_session_cls: type[GuardedSession]
    connector_args: dict[str, Any]


def guarded_options(resolver: GuardedResolver) -> GuardedOptions:
    """What to give to ``AioConfig`` for a client behind the guard, beside its other arguments."""
    return {"http_session_cls": GuardedSession, "connector_args": {"resolver": resolver}}


class _Connector(GuardedConnector, _ProxySSLTCPConnector):  # type: ignore[misc]
    """The client's own connector, guarded."""


class GuardedSession(AIOHTTPSession):  # type: ignore[misc]
    """The client's own session. Refusals come out of a call as they are, not as one of the client's errors."""

    async def send(self, request: AWSPreparedRequest) -> AioAWSResponse:
        """One request, with the redirects that aiohttp follows."""
        try:
            return await super().send(request)
        except HTTPClientError as error:
            if isinstance(error.__context__, EgressRefusedError):
                raise error.__context__ from None
            raise

    async def _create_connector(self, proxy_url: str | None) -> GuardedConnector:
        tls, proxy_tls = await asyncio.to_thread(self._build_ssl_contexts, proxy_url)
        return _Connector(
            limit=self._max_pool_connections, ssl=tls, proxy_ssl_context=proxy_tls, **self._connector_args
        )
