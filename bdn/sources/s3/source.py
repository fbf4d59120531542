"""Buckets of S3 and of compatible services, R2 and CoreWeave included: listings, heads and addresses of objects, with our errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final

from bdn.core.errors import AuthRequiredError, SourceChangedError
from bdn.core.source.upstream import Checksum, Location, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.bucket_source import BucketPage, BucketSource
from bdn.sources.s3.answers import LISTING, read_page, read_refusal, stated_checksum
from bdn.sources.s3.bucket import RegionalBucket, open_bucket
from bdn.sources.sign_in import SourceContext

_NO_VERSION: Final = "null"  # S3's name for the version of an object written while versioning was off


class S3Source(BucketSource):
    """Locating a file of more than one chunk costs one request."""

    is_size_in_identity: ClassVar[bool] = True

    def __init__(self, uri: BucketUri, context: SourceContext, bucket: RegionalBucket) -> None:
        super().__init__(uri, context.reader, *bucket.place)
        self._bucket = bucket
        self._may_read_versions: bool | None = None  # not known yet

    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Prefix": prefix, "MaxKeys": limit}
        request["EncodingType"] = "url"  # XML cannot hold every character that a key can
        if token:
            request["ContinuationToken"] = token

        async def read(client: Any) -> BucketPage:  # noqa: ANN401
            listing = await client.list_objects_v2(**request)
            return await asyncio.to_thread(read_page, listing[LISTING])

        return await self._bucket.ask(read)

    async def locate(self, file: UpstreamFile) -> Location:
        """A presigned address, or the plain one for anonymous reading.

        For a file of one chunk it is made without a request, and the answer to the GET contains the checksum. For a
        larger file a HEAD requests the checksum, because S3 does not return it for ranges. ``If-Match`` is not part of
        the signature, so any HTTP client can use the address.
        """
        version_id = checksum = None
        if not file.is_one_chunk:
            found, checksum = await self._head(file)
            if found is not None and await self._versions_may_be_read(file, found):
                version_id = found
        url, expires_at = await self._bucket.address(file.handle, version_id)
        return Location(
            url,
            (("If-Match", file.version), *self._bucket.headers),
            etag=file.version,
            expires_at=expires_at,
            checksum=checksum,
            stated=stated_checksum if file.is_one_chunk else None,
            refused=partial(read_refusal, str(self._uri), file.path),
            may_be_encoded=True,  # S3 returns bytes as they were put, with the encoding that was put with them
        )

    async def _versions_may_be_read(self, file: UpstreamFile, version_id: str) -> bool:
        """Whether this reader has s3:GetObjectVersion, which many readers lack.

        Requested once per source. Without it, If-Match alone pins the bytes.
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
        """Version and checksum of a listed file; the version is None if the bucket is not versioned.

        Raises ``SourceChangedError``: the file differs from the listed one.
        """
        request: dict[str, object] = {"Bucket": self._uri.bucket, "Key": file.handle, "IfMatch": file.version}
        request["ChecksumMode"] = "ENABLED"
        if version_id is not None:
            request["VersionId"] = version_id

        async def read(client: Any) -> tuple[str, int, str | None, Checksum | None]:  # noqa: ANN401
            head = await client.head_object(**request)
            checksum = stated_checksum(head["ResponseMetadata"]["HTTPHeaders"])
            return head["ETag"].strip('"'), head["ContentLength"], head.get("VersionId"), checksum

        etag, size, found, checksum = await self._bucket.ask(read, file.path)
        if etag != file.version.strip('"'):  # for servers that ignore If-Match
            raise SourceChangedError(str(self._uri), file.path, "its ETag changed")
        if size != file.size:
            raise SourceChangedError(str(self._uri), file.path, f"its size was {file.size} and is {size}")
        return None if found == _NO_VERSION else found, checksum


@asynccontextmanager
async def open_s3(uri: BucketUri, context: SourceContext) -> AsyncIterator[S3Source]:
    """Open the source without a request; its connections are closed at the end."""
    async with open_bucket(uri, context) as bucket:
        yield S3Source(uri, context, bucket)
