"""A bucket of S3, queried and addressed in its own region."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeVar

from botocore.exceptions import ClientError

from bdn.core.source.uri import BucketUri
from bdn.sources.s3.answers import SDK_ERRORS, region_told, translate
from bdn.sources.s3.client import S3Endpoint, bucket_address, s3_client
from bdn.sources.s3.credentials import endpoint_of
from bdn.sources.s3.signature import CHECKSUM_MODE, REQUESTER_PAYS, AddressSigner, plain_address
from bdn.sources.sign_in import SourceContext

ADDRESS_SECONDS: Final = 3600

Answer = TypeVar("Answer")


class RegionalBucket:
    """Follows a redirect to another region once. ``open_client`` opens a client for a region.

    Identities of the bucket's objects begin with ``place``; requests to their addresses must send ``headers``.
    """

    def __init__(
        self,
        uri: BucketUri,
        context: SourceContext,
        endpoint: S3Endpoint,
        open_client: Callable[[str], Awaitable[Any]],
    ) -> None:
        self.place: Final = endpoint.place
        self.headers: Final = (CHECKSUM_MODE, REQUESTER_PAYS) if endpoint.requester_pays else (CHECKSUM_MODE,)
        self._uri = uri
        self._context = context
        self._credentials = endpoint.credentials
        self._home = self._region = endpoint.region
        self._open_client = open_client
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._base: str | None = None
        self._signer: AddressSigner | None = None

    async def ask(self, read: Callable[[Any], Awaitable[Answer]], path: str | None = None) -> Answer:
        """Run one request; ``path`` is the file that it is about.

        Keys near their expiry are renewed before a slot is acquired, because the token service may need a slot of the
        same host. The renewal has its own retries, which inside the slot would multiply ours.
        """

        async def once() -> Answer:
            try:
                return await self._follow(read)
            except SDK_ERRORS as error:
                anonymous = self._credentials is None
                raise translate(error, str(self._uri), anonymous=anonymous, path=path) from error

        base = await self._base_address()
        if self._credentials is not None:
            await self._credentials.get()
        return await self._context.asker.ask(base, once)

    async def address(self, key: str, version_id: str | None) -> tuple[str, float | None]:
        """The address to read the object with ``headers``, and its expiry. Computed without a request, in microseconds.

        Signed for the region in which the bucket answered before.
        """
        base = self._base or await self._base_address()
        if self._credentials is None:
            return plain_address(base, key, version_id), None
        credentials, now = await self._credentials.get(), int(self._context.clock())
        signer = self._signer
        if signer is None or signer.signed_at != now or signer.credentials is not credentials or signer.base != base:
            signer = self._signer = AddressSigner.of(base, self._region, credentials, now, ADDRESS_SECONDS)
        version = {} if version_id is None else {"versionId": version_id}
        return signer.address(key, version, headers=self.headers), signer.expires_at

    async def _base_address(self) -> str:
        """The bucket's own address, with a final slash, by the client's rules of regions and partitions."""
        if self._base is None:
            try:
                client, _ = await self._current()
                self._base = await bucket_address(client, self._uri.bucket)
            except SDK_ERRORS as error:
                raise translate(error, str(self._uri), anonymous=self._credentials is None) from error
        return self._base

    async def _follow(self, read: Callable[[Any], Awaitable[Answer]]) -> Answer:
        client, region = await self._current()
        try:
            return await read(client)
        except ClientError as error:
            told = region_told(error)
            if told is None or told == region or not await self._move(told):
                raise
        client, _ = await self._current()
        return await read(client)

    async def _current(self) -> tuple[Any, str]:
        async with self._opening:
            if self._client is None:
                self._client = await self._open_client(self._region)
            return self._client, self._region

    async def _move(self, region: str) -> bool:
        """Change to the region. Returns False if another region was followed before: two redirects are an error."""
        async with self._opening:
            if self._region == self._home:
                self._client = await self._open_client(region)
                self._region, self._base = region, None
            return self._region == region


@asynccontextmanager
async def open_bucket(uri: BucketUri, context: SourceContext) -> AsyncIterator[RegionalBucket]:
    """Open the bucket without a request; its connections are closed at the end."""
    endpoint = endpoint_of(uri, context)
    async with AsyncExitStack() as stack:

        def open_client(region: str) -> Awaitable[Any]:
            return stack.enter_async_context(s3_client(uri.bucket, endpoint, region, context.settings))

        yield RegionalBucket(uri, context, endpoint, open_client)
