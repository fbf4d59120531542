"""What of a bucket a source is: a folder, everything, or one object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from bdn.core.errors import InvalidSourceError
from bdn.core.paths import UnsafePathError, normalise_path
from bdn.core.ports import Location, Resolution
from bdn.core.source_uri import BucketUri
from bdn.core.upstream import Identity, UpstreamFile
from bdn.sources.s3_bucket import S3Bucket, S3Object


class S3Source:
    """One source of S3. Resolving costs nothing: buckets have no revisions. Each 1000 objects cost one request.

    Args:
        uri: the bucket and prefix; a prefix without a final slash may name an object, which only the listing tells.
        bucket: the opened bucket, open for as long as this is used.
        endpoint: where the bucket is: ``aws``, or the address of another server.
        organisation: who alone may find the content again by its listing.
    """

    def __init__(self, uri: BucketUri, bucket: S3Bucket, *, endpoint: str, organisation: str) -> None:
        self._uri = uri
        self._bucket = bucket
        self._endpoint = endpoint
        self._scope = f"organisation:{organisation}"

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),  # noqa: ARG002
    ) -> AsyncIterator[UpstreamFile]:
        """Every object; keys that end with a slash mark folders and are left out."""
        prefix = self._uri.prefix
        if prefix and not prefix.endswith("/"):
            if found := await self._object(prefix):
                yield self._file(found, prefix.rpartition("/")[2])
                return
            prefix = f"{prefix}/"
        token = None
        while True:
            page = await self._bucket.page(prefix, token=token)
            for entry in page.objects:
                if not entry.key.endswith("/"):
                    yield self._file(entry, entry.key.removeprefix(prefix))
            if page.following is None:
                return
            token = page.following

    async def locate(self, file: UpstreamFile) -> Location:
        """A presigned address, or the plain one for anonymous reading; made here, without a request.

        ``If-Match`` goes beside the signature, not inside it, so that any HTTP client can use the address.
        """
        return Location(await self._bucket.link(file.handle), (("If-Match", file.version),), etag=file.version)

    async def _object(self, key: str) -> S3Object | None:
        """The object of exactly this key. It sorts before everything that it is a prefix of, so one entry tells.

        Raises:
            InvalidSourceError: there is a folder of the same name.
        """
        first = (await self._bucket.page(key, limit=1)).objects
        if not first or first[0].key != key:
            return None
        below = await self._bucket.page(f"{key}/", limit=2)  # two: the first may be the folder's own marker
        if any(not entry.key.endswith("/") for entry in below.objects):
            raise InvalidSourceError(
                str(self._uri), f"{self._uri} is both an object and a folder; add a slash for the folder: {self._uri}/"
            )
        return first[0]

    def _file(self, entry: S3Object, path: str) -> UpstreamFile:
        """Without a checksum: an ETag is the MD5 only where KMS is not used, and a listing does not tell."""
        try:
            path = normalise_path(path)
        except UnsafePathError as error:
            raise InvalidSourceError(str(self._uri), f"{self._uri} cannot become a tree of files: {error}") from error
        parts = ("s3", self._endpoint, self._uri.bucket, entry.key, entry.etag, str(entry.size))
        return UpstreamFile(path, entry.size, Identity.of(self._scope, *parts), entry.key, entry.etag)
