"""AWS clients with one attempt, no redirects and the egress guard.

They use only what they are given: no profiles, files or roles of the machine.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.httpsession import AIOHTTPSession, _ProxySSLTCPConnector
from aiobotocore.session import AioSession
from botocore import UNSIGNED, handlers
from botocore.awsrequest import AWSPreparedRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import HTTPClientError
from botocore.loaders import Loader

from bdn.core.egress import EgressPolicy
from bdn.core.errors import EgressRefusedError
from bdn.sources.guarded_connector import GuardedConnector, GuardedResolver
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.answers import LISTING
from bdn.sources.s3.signature import REQUESTER_PAYS
from bdn.sources.settings import S3Credentials, UpstreamSettings

# In botocore's form: (name in a config file, environment variable, default, conversion).
_NOTHING_AMBIENT: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


# Resolved at import: a version of the client without it must fail here, not run unguarded.
_MAKES_CONNECTORS: Final = AIOHTTPSession._create_connector  # noqa: SLF001


def guarded_config(egress: EgressPolicy, signature_version: str | None, **more: object) -> AioConfig:
    """A client's configuration. Without a signature version it sends no credentials. Made inside a running loop."""
    return AioConfig(
        signature_version=signature_version or UNSIGNED,
        ignore_configured_endpoint_urls=True,
        connect_timeout=10,
        retries={"total_max_attempts": 1, "mode": "standard"},
        http_session_cls=GuardedSession,
        connector_args={"resolver": GuardedResolver(egress)},
        **more,
    )


class _Connector(GuardedConnector, _ProxySSLTCPConnector):  # type: ignore[misc]
    pass


class _WithoutRedirects:
    def __init__(self, session: Any) -> None:  # noqa: ANN401 - aiohttp's, whose arguments are passed on unchanged
        self._session = session

    async def request(self, method: str, **options: Any) -> Any:  # noqa: ANN401
        return await self._session.request(method, **options, allow_redirects=False)


class GuardedSession(AIOHTTPSession):  # type: ignore[misc]
    """Raises refusals of the egress guard unchanged, not wrapped in an error of the client.

    Redirects are not followed: aiohttp would send session tokens, and identity tokens in bodies, to another host.
    """

    async def send(self, request: AWSPreparedRequest) -> AioAWSResponse:
        try:
            return await super().send(request)
        except HTTPClientError as error:
            if isinstance(error.__context__, EgressRefusedError):
                raise error.__context__ from None
            raise

    async def _get_session(self, proxy_url: str | None) -> _WithoutRedirects:
        return _WithoutRedirects(await super()._get_session(proxy_url))

    async def _create_connector(self, proxy_url: str | None) -> GuardedConnector:
        tls, proxy_tls = await asyncio.to_thread(self._build_ssl_contexts, proxy_url)
        return _Connector(
            limit=self._max_pool_connections, ssl=tls, proxy_ssl_context=proxy_tls, **self._connector_args
        )


def aws_session() -> AioSession:
    session = AioSession(session_vars=_NOTHING_AMBIENT)
    session.register_component("data_loader", _botocore_data())
    return session


@cache
def _botocore_data() -> Loader:
    """Cached: loading the client's service descriptions takes 80 of the 100 ms of making a client."""
    return Loader()


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """``url`` None is AWS, ``credentials`` None is anonymous. Identities begin with ``place``."""

    url: str | None
    region: str
    credentials: Refreshing[S3Credentials] | None
    place: tuple[str, ...]
    addressing: str = "auto"  # or "path", "virtual"
    requester_pays: bool = False


@asynccontextmanager
async def s3_client(bucket: str, endpoint: S3Endpoint, region: str, settings: UpstreamSettings) -> AsyncIterator[Any]:
    """Open a client of S3 for this bucket, without a request; its connections are closed at the end."""
    # Names with dots have no certificate under virtual hosting; servers other than AWS often have no wildcard DNS.
    style = "path" if endpoint.url or "." in bucket else "virtual"
    config = guarded_config(
        settings.egress,
        "s3v4" if endpoint.credentials else None,
        read_timeout=60,
        s3={"addressing_style": style if endpoint.addressing == "auto" else endpoint.addressing},
    )
    session = aws_session()
    session.register_component("credential_provider", _ProvidedKeys(endpoint.credentials))
    async with session.create_client(
        "s3", region_name=region, endpoint_url=endpoint.url, verify=settings.ca_bundle, config=config
    ) as client:
        # The handler parses every body as XML to find errors with status 200. Only listings have such bodies, and
        # ``read_page`` detects the errors.
        client.meta.events.unregister("before-parse.s3.*", handlers._handle_200_error)  # noqa: SLF001
        client.meta.events.register("before-parse.s3.ListObjectsV2", _leave_listing_unread)
        client.meta.events.register_first("needs-retry.s3", _do_not_change_regions)
        if endpoint.requester_pays:
            client.meta.events.register("before-sign.s3", _pay)
        yield client


async def bucket_address(client: Any, bucket: str) -> str:  # noqa: ANN401 - of ``s3_client``
    """The bucket's own address, with a final slash, by the client's rules of regions and partitions."""
    address = await client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "k"})
    return str(address).partition("?")[0].removesuffix("k")


class _ProvidedKeys:
    """Replaces the client's credential chain: requests the keys from our provider for each signed request."""

    def __init__(self, provider: Refreshing[S3Credentials] | None) -> None:
        self._provider = provider

    async def load_credentials(self) -> AioCredentials | None:
        return None if self._provider is None else _CurrentKeys(self._provider)


class _CurrentKeys(AioCredentials):  # type: ignore[misc]
    def __init__(self, provider: Refreshing[S3Credentials]) -> None:
        super().__init__("never", "used")
        self._provider = provider

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        keys = await self._provider.get()
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)


def _leave_listing_unread(
    response_dict: MutableMapping[str, Any], customized_response_dict: MutableMapping[str, object], **_: object
) -> None:
    """Bypass the client's parser, which is ten times slower than ``read_page``."""
    if response_dict["status_code"] == 200:
        customized_response_dict[LISTING] = response_dict["body"]
        response_dict["body"] = b""


def _pay(request: Any, **_: object) -> None:  # noqa: ANN401 - the client's own
    name, value = REQUESTER_PAYS
    request.headers[name] = value


def _do_not_change_regions(request_dict: Mapping[str, Any], **_: object) -> None:
    """Disable the client's own redirect to another region: it would hide the bucket's region from us."""
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True
