"""One bucket of S3, or of what speaks S3: pages of its listing and addresses of its objects, with our errors.

Only what is passed in counts: the machine's AWS profiles, files and roles are left alone.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, TypedDict, cast

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.loaders import Loader

from bdn.core.errors import UpstreamUnavailableError
from bdn.core.source_uri import BucketUri
from bdn.sources.credentials import S3Credentials
from bdn.sources.s3_errors import SDK_ERRORS, translate

PAGE: Final = 1000  # keys per request, the most that S3 gives
LINK_SECONDS: Final = 3600
# In botocore's form: (name in a config file, environment variable, default, conversion).
_NOTHING_AMBIENT: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


class _Entry(TypedDict):
    Key: str
    ETag: str
    Size: int


class _Listing(TypedDict, total=False):
    Contents: list[_Entry]
    IsTruncated: bool
    NextContinuationToken: str


class _Client(Protocol):
    async def list_objects_v2(self, **request: object) -> _Listing: ...

    async def generate_presigned_url(self, ClientMethod: str, Params: dict[str, str], ExpiresIn: int) -> str: ...  # noqa: N803


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Which S3, and as whom. ``url`` None is AWS; ``credentials`` None is anonymous."""

    url: str | None
    region: str
    credentials: S3Credentials | None
    ca_bundle: str | None = None


@dataclass(frozen=True, slots=True)
class S3Object:
    """One listed object. ``etag`` is as it stands in the header of an answer, quotes included."""

    key: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class S3Page:
    """Objects in the order of their keys, and the token of the page after them, None at the end."""

    objects: tuple[S3Object, ...]
    following: str | None


class S3Bucket:
    """The bucket of a source. Every request is made once: retries are the caller's."""

    def __init__(self, uri: BucketUri, client: _Client, *, anonymous: bool) -> None:
        self._uri = uri
        self._client = client
        self._anonymous = anonymous

    async def page(self, prefix: str, *, limit: int = PAGE, token: str | None = None) -> S3Page:
        """Up to ``limit`` objects whose keys begin with ``prefix``, after those of the page that gave the token."""
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Prefix": prefix, "MaxKeys": limit}
        if token:
            request["ContinuationToken"] = token
        try:
            listing = await self._client.list_objects_v2(**request)
            # Some servers list an ETag without its quotes.
            objects = tuple(
                S3Object(entry["Key"], '"' + entry["ETag"].strip('"') + '"', int(entry["Size"]))
                for entry in listing.get("Contents", ())
            )
        except SDK_ERRORS as error:
            raise translate(error, str(self._uri), anonymous=self._anonymous) from error
        following = listing.get("NextContinuationToken") if listing.get("IsTruncated") else None
        if listing.get("IsTruncated") and not following:
            # Taking this page for the last one would silently mirror a part.
            raise UpstreamUnavailableError(str(self._uri), "a listing goes on but does not tell where")
        return S3Page(objects, following)

    async def link(self, key: str) -> str:
        """An address that reads the object for an hour, made without a request; for anonymous readers the plain one."""
        try:
            return await self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self._uri.bucket, "Key": key}, ExpiresIn=LINK_SECONDS
            )
        except SDK_ERRORS as error:
            raise translate(error, str(self._uri), anonymous=self._anonymous) from error


@asynccontextmanager
async def connect(uri: BucketUri, endpoint: S3Endpoint) -> AsyncIterator[S3Bucket]:
    """The bucket, without a request yet; its connections are closed at the end."""
    credentials = endpoint.credentials
    config = AioConfig(
        signature_version="s3v4" if credentials else UNSIGNED,
        ignore_configured_endpoint_urls=True,
        connect_timeout=10,
        read_timeout=60,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Names with dots have no certificate under virtual hosting; servers other than AWS often have no wildcard DNS.
        s3={"addressing_style": "path" if endpoint.url or "." in uri.bucket else "virtual"},
    )
    session = AioSession(session_vars=_NOTHING_AMBIENT)
    session.register_component("data_loader", _botocore_data())
    async with session.create_client(
        "s3",
        region_name=endpoint.region,
        endpoint_url=endpoint.url,
        verify=endpoint.ca_bundle,
        aws_access_key_id=credentials and credentials.access_key_id,
        aws_secret_access_key=credentials and credentials.secret_access_key,
        aws_session_token=credentials and credentials.session_token,
        config=config,
    ) as client:
        yield S3Bucket(uri, cast("_Client", client), anonymous=credentials is None)


@cache
def _botocore_data() -> Loader:
    """The SDK's description of S3, read once: it is most of the time that a client takes to make (80 of 100 ms)."""
    return Loader()
