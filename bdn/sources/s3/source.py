"""Buckets of S3, and of what speaks S3, R2 among them: listings, heads and addresses of objects, with our errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, Final, TypeVar

from botocore.exceptions import ClientError

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import AuthRequiredError, SourceChangedError
from bdn.core.source.upstream import Checksum, Location, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.bucket_source import BucketPage, BucketSource
from bdn.sources.s3.answers import SDK_ERRORS, read_page, region_told, stated_checksum, translate
from bdn.sources.s3.client import LISTING, S3Endpoint, s3_client
from bdn.sources.s3.credentials import endpoint_of
from bdn.sources.s3.signature import CHECKSUM_MODE, GetSigner, plain_address
from bdn.sources.sign_in import SourceContext

ADDRESS_SECONDS: Final = 3600
_NO_VERSION: Final = "null"  # what S3 calls the version of an object that was written while versioning was off

Answer = TypeVar("Answer")


class S3Source(BucketSource):
    """Each file of more than one chunk costs one request when it is located.

    A bucket of another region than it was opened in is followed there, once. ``open_client`` opens a client for a region.
    """

    is_size_in_identity: ClassVar[bool] = True

    def __init__(
        self,
        uri: BucketUri,
        context: SourceContext,
        endpoint: S3Endpoint,
        open_client: Callable[[str], Awaitable[Any]],
    ) -> None:
        super().__init__(uri, context.organisation, *endpoint.place)
        self._context = context
        self._credentials = endpoint.credentials
        self._home = self._region = endpoint.region
        self._open_client = open_client
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._base: str | None = None
        self._signer: GetSigner | None = None
        self._may_read_versions: bool | None = None  # not known yet

    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        """See ``BucketSource``."""
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Prefix": prefix, "MaxKeys": limit}
        request["EncodingType"] = "url"  # XML cannot hold every character that a key can
        if token:
            request["ContinuationToken"] = token

        async def read(client: Any) -> BucketPage:  # noqa: ANN401
            listing = await client.list_objects_v2(**request)
            return await asyncio.to_thread(read_page, listing[LISTING])

        return await self._ask(read)

    async def locate(self, file: UpstreamFile) -> Location:
        """A presigned address, or the plain one for anonymous reading.

        For a file of one chunk it is made without a request, and the answer to the GET states the checksum; that of a
        larger one is asked for here, because S3 does not state it for ranges. ``If-Match`` goes beside the signature, not
        inside it, so that any HTTP client can use the address.
        """
        version_id = checksum = None
        if file.size > CHUNK_SIZE:
            found, checksum = await self._head(file)
            if found is not None and await self._versions_may_be_read(file, found):
                version_id = found
        url, expires_at = await self._address(file.handle, version_id)
        return Location(
            url,
            (("If-Match", file.version), CHECKSUM_MODE),
            etag=file.version,
            expires_at=expires_at,
            checksum=checksum,
            stated=stated_checksum if file.size <= CHUNK_SIZE else None,
            may_be_encoded=True,  # S3 gives bytes as they were put, with the encoding that was put with them
        )

    async def _versions_may_be_read(self, file: UpstreamFile, version_id: str) -> bool:
        """Reading a version needs a permission of its own (s3:GetObjectVersion), which many readers do not have.

        Asked once for a source. Without it, If-Match alone pins what is read.
        """
        if self._may_read_versions is None:
            try:
                await self._head(file, version_id)
            except AuthRequiredError:
                self._may_read_versions = False
            else:
                self._may_read_versions = True
        return self._may_read_versions

    async def _head(self, file: UpstreamFile, version_id: str | None = None) -> tuple[str | None, Checksum | None]:
        """The version and the checksum of a listed file; the version is None where the bucket does not keep versions.

        Raises ``SourceChangedError``: it is not the listed one any more.
        """
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Key": file.handle, "IfMatch": file.version}
        request["ChecksumMode"] = "ENABLED"
        if version_id is not None:
            request["VersionId"] = version_id

        async def read(client: Any) -> tuple[str, int, str | None, Checksum | None]:  # noqa: ANN401
            head = await client.head_object(**request)
            checksum = stated_checksum(head["ResponseMetadata"]["HTTPHeaders"])
            return head["ETag"].strip('"'), head["ContentLength"], head.get("VersionId"), checksum

        etag, size, found, checksum = await self._ask(read, file.path)
        if etag != file.version.strip('"'):  # where If-Match is not understood
            raise SourceChangedError(str(self._uri), file.path, "its ETag is another one")
        if size != file.size:
            raise SourceChangedError(str(self._uri), file.path, f"its size was {file.size} and is {size}")
        return None if found == _NO_VERSION else found, checksum

    async def _address(self, key: str, version_id: str | None) -> tuple[str, float | None]:
        """Where the object is read, and until when; made without a request, in some microseconds.

        It is signed for the region in which the bucket answered before.
        """
        base = self._base or await self._base_address()
        if self._credentials is None:
            return plain_address(base, key, version_id), None
        credentials, now = await self._credentials.get(), int(self._context.clock())
        signer = self._signer
        if signer is None or signer.signed_at != now or signer.credentials is not credentials or signer.base != base:
            signer = self._signer = GetSigner.of(base, self._region, credentials, now, ADDRESS_SECONDS)
        return signer.address(key, version_id), signer.expires_at

    async def _base_address(self) -> str:
        """The bucket's own address, with a final slash: the client knows the rules of all regions and partitions."""
        if self._base is None:
            try:
                client, _ = await self._current()
                address = await client.generate_presigned_url("get_object", {"Bucket": self._uri.bucket, "Key": "k"})
            except SDK_ERRORS as error:
                raise translate(error, str(self._uri), anonymous=self._credentials is None) from error
            self._base = str(address).partition("?")[0].removesuffix("k")
        return self._base

    async def _ask(self, read: Callable[[Any], Awaitable[Answer]], path: str | None = None) -> Answer:
        """One request; ``path`` is of the file that it is about.

        Keys that are about to end are renewed before a slot is taken, which the token service on the same host may need.
        Its failures are its own then: inside, each attempt of ours would be many of its.
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
        """Whether the bucket is asked in that region now; regions that send us to and fro are an error."""
        async with self._opening:
            if self._region == self._home:
                self._client = await self._open_client(region)
                self._region, self._base = region, None
            return self._region == region


@asynccontextmanager
async def open_s3(uri: BucketUri, context: SourceContext) -> AsyncIterator[S3Source]:
    """The source, without a request yet; its connections are closed at the end."""
    endpoint = endpoint_of(uri, context)
    async with AsyncExitStack() as stack:

        def open_client(region: str) -> Awaitable[Any]:
            return stack.enter_async_context(s3_client(uri.bucket, endpoint, region, context.settings))

        yield S3Source(uri, context, endpoint, open_client)
