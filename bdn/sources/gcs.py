"""Buckets of Google Cloud Storage, and of emulators that speak its JSON API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from bdn.core.errors import InvalidSourceError
from bdn.core.paths import UnsafePathError, normalise_path
from bdn.core.ports import Location, Resolution
from bdn.core.source_uri import BucketUri
from bdn.core.upstream import Identity, UpstreamFile
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
        self._endpoint = endpoint
        self._scope = f"organisation:{organisation}"

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """The live generation of every object; names that end with a slash mark folders and are left out.

        One listing for each text of ``within``, whose names begin with it exactly as it is written: of names with empty or
        ``.`` segments, only those are found in which such a segment comes after the text.
        """
        prefix = self._uri.prefix
        if prefix and not prefix.endswith("/"):
            if found := await self._object(prefix):
                name = prefix.rpartition("/")[2]
                if name.startswith(tuple(within)):
                    yield self._file(found, name)
                return
            prefix = f"{prefix}/"
        for beginning in within:
            async for entry in self._bucket.objects(f"{prefix}{beginning}"):
                if not entry.name.endswith("/"):
                    yield self._file(entry, entry.name.removeprefix(prefix))

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of this generation. Any other bytes are a 404, so the answers' ``ETag`` need not be compared."""
        return await self._bucket.link(file.handle, file.version)

    async def _object(self, name: str) -> GcsObject | None:
        """The object of exactly this name. It sorts before everything that it is a prefix of, so one entry tells.

        Raises:
            InvalidSourceError: there is a folder of the same name.
        """
        async for found in self._bucket.objects(name, page=1):
            if found.name != name:
                return None
            async for below in self._bucket.objects(f"{name}/"):
                if not below.name.endswith("/"):
                    raise InvalidSourceError(
                        str(self._uri),
                        f"{self._uri} is both an object and a folder; add a slash for the folder: {self._uri}/",
                    )
            return found
        return None

    def _file(self, entry: GcsObject, path: str) -> UpstreamFile:
        try:
            path = normalise_path(path)
        except UnsafePathError as error:
            raise InvalidSourceError(str(self._uri), f"{self._uri} cannot become a tree of files: {error}") from error
        identity = Identity.of(self._scope, "gs", self._endpoint, self._uri.bucket, entry.name, entry.generation)
        return UpstreamFile(path, entry.size, identity, entry.name, entry.generation, entry.checksum)
