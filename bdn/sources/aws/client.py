"""The AWS client of one bucket in one region, as we want it: one attempt, nothing ambient, keys that may be renewed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypedDict, cast

from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from botocore import UNSIGNED, handlers
from botocore.credentials import ReadOnlyCredentials

from bdn.core.egress.rules import PUBLIC_INTERNET, EgressPolicy
from bdn.sources.aws.guarded import guarded_options
from bdn.sources.aws.session import UnredirectedSession, aws_session
from bdn.sources.credentials import S3CredentialsProvider
from bdn.sources.guarded_connector import GuardedResolver

LISTING: Final = "UnreadListing"  # where a listing's body is found in the answer


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Which S3, and as whom. ``url`` None is AWS; ``credentials`` None is anonymous."""

    url: str | None
    region: str
    credentials: S3CredentialsProvider | None
    ca_bundle: str | None = None
    egress: EgressPolicy = PUBLIC_INTERNET


class Metadata(TypedDict):
    """The head of an answer, names in lower case."""

    HTTPHeaders: Mapping[str, str]


class Listing(TypedDict):
    """A page of a listing as the server wrote it."""

    UnreadListing: bytes


class Head(TypedDict, total=False):
    """What HEAD tells."""

    ETag: str
    ContentLength: int
    VersionId: str
    ResponseMetadata: Metadata


class Client(Protocol):
    """What we ask it for."""

    async def list_objects_v2(self, **request: object) -> Listing:
        """One page of a listing."""
        ...

    async def head_object(self, **request: object) -> Head:
        """The head of one object."""
        ...

    async def generate_presigned_url(self, ClientMethod: str, Params: dict[str, str]) -> str:  # noqa: N803
        """An address, made without a request."""
        ...


@asynccontextmanager
async def s3_client(bucket: str, endpoint: S3Endpoint, region: str) -> AsyncIterator[Client]:
    """A client for this bucket, without a request yet; its connections are closed at the end."""
    guard = guarded_options(GuardedResolver(endpoint.egress))
    guard["http_session_cls"] = UnredirectedSession
    config = AioConfig(
        signature_version="s3v4" if endpoint.credentials else UNSIGNED,
        ignore_configured_endpoint_urls=True,
        connect_timeout=10,
        read_timeout=60,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Names with dots have no certificate under virtual hosting; servers other than AWS often have no wildcard DNS.
        s3={"addressing_style": "path" if endpoint.url or "." in bucket else "virtual"},
        **guard,
    )
    session = aws_session()
    session.register_component("credential_provider", _Keys(endpoint.credentials))
    async with session.create_client(
        "s3", region_name=region, endpoint_url=endpoint.url, verify=endpoint.ca_bundle, config=config
    ) as client:
        # Reads every body as XML to find errors with status 200; our reader of listings does, and there are no others.
        client.meta.events.unregister("before-parse.s3.*", handlers._handle_200_error)  # noqa: SLF001
        client.meta.events.register("before-parse.s3.ListObjectsV2", _leave_listing_unread)
        client.meta.events.register_first("needs-retry.s3", _do_not_change_regions)
        yield cast("Client", client)


class _Keys:
    """In the client's place for finding credentials: asks our provider for each request that is signed."""

    def __init__(self, provider: S3CredentialsProvider | None) -> None:
        self._provider = provider

    async def load_credentials(self) -> AioCredentials | None:
        return None if self._provider is None else _CurrentKeys(self._provider)


class _CurrentKeys(AioCredentials):  # type: ignore[misc]
    def __init__(self, provider: S3CredentialsProvider) -> None:
        super().__init__("never", "used")
        self._provider = provider

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        keys = await self._provider.get()
        return ReadOnlyCredentials(keys.access_key_id, keys.secret_access_key, keys.session_token)


def _leave_listing_unread(
    response_dict: MutableMapping[str, Any], customized_response_dict: MutableMapping[str, object], **_: object
) -> None:
    """Take the listing away from the client's parser, which is ten times slower than ours."""
    if response_dict["status_code"] == 200:
        customized_response_dict[LISTING] = response_dict["body"]
        response_dict["body"] = b""


def _do_not_change_regions(request_dict: Mapping[str, Any], **_: object) -> None:
    """Tell the client that it did so already: it would follow a bucket without letting us know where it is."""
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True
