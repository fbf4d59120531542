"""Buckets of Google Cloud Storage, and of emulators that speak its JSON API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from bdn.core.ports import Location, Resolution
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.core.store.slabs import scope_of
from bdn.sources.bucket_tree import BucketTree
from bdn.sources.google.bucket import GcsBucket, GcsObject


class GcsSource:
    """One source of GCS. Resolving costs nothing: buckets have no revisions. Each 1000 objects cost one request.

    Args:
        uri: the bucket and prefix; a prefix without a final slash may name an object, which only the listing tells.
        bucket: the opened bucket, open for as long as this is used.
        endpoint: the address of the server, of which Google's is one.
        organisation: who alone may find the content again by its listing.
    """

    def __init__(self, uri: BucketUri, bucket: GcsBucket, *, endpoint: str, organisation: str) -> None:
        self._uri = uri
        self._bucket = bucket
        self._tree = BucketTree(uri, bucket)
        self._endpoint = endpoint
        self._scope = scope_of(organisation)

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """The live generation of every object; see ``BucketTree.files``."""
        async for path, entry in self._tree.files(within):
            yield self._file(entry, path)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of this generation. Any other bytes are a 404, so the answers' ``ETag`` need not be compared."""
        return await self._bucket.link(file.handle, file.version)

    def _file(self, entry: GcsObject, path: str) -> UpstreamFile:
        identity = Identity.of(self._scope, "gs", self._endpoint, self._uri.bucket, entry.name, entry.generation)
        return UpstreamFile(path, entry.size, identity, entry.name, entry.generation, entry.checksum)
