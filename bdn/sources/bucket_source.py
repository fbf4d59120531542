"""The source that a bucket is, whatever its kind: a folder of it, everything, or one object."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from bdn.core.errors import InvalidSourceError, UpstreamUnavailableError
from bdn.core.source.upstream import Checksum, Identity, Location, Resolution, UpstreamFile, listed_path
from bdn.core.source.uri import BucketUri
from bdn.core.store import scope_of

PAGE: Final = 1000  # objects per request, the most that anybody gives


@dataclass(frozen=True, slots=True)
class BucketObject:
    """One listed object: its key, its size in bytes, what pins these bytes when it is read, and when it was written, as it was told."""

    name: str
    size: int
    version: str
    checksum: Checksum | None = None
    modified: str = field(
        default="", compare=False
    )  # its text: sources do not read it, and some have a million objects


@dataclass(frozen=True, slots=True)
class BucketPage:
    """Objects in the order of their names, and the token of the page after them, None at the end."""

    objects: tuple[BucketObject, ...]
    following: str | None


class NotAListingError(ValueError):
    """The answer is something else than a listing; the text tells what, without any of its content."""


class BucketSource(ABC):
    """Each 1000 objects cost one request. Resolving costs none: buckets have no revisions.

    Args:
        uri: the bucket and prefix; a prefix without a final slash may name an object, which only the listing tells.
        reader: the organisation or team that alone may find the content again by its listing.
        place: where the bucket is; identities begin with it.
    """

    is_size_in_identity: ClassVar[bool]  # changes every identity that a database holds

    def __init__(self, uri: BucketUri, reader: str, *place: str) -> None:
        self._uri = uri
        self._scope = scope_of(reader)
        self._place = (*place, uri.bucket)

    @abstractmethod
    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        """Up to ``limit`` objects whose names begin with ``prefix``, after those of the page that gave the token."""

    @abstractmethod
    async def locate(self, file: UpstreamFile) -> Location:
        """Where this version of the file is read."""

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """Every object; names that end with a slash mark folders and are left out.

        One listing for each text of ``within``, whose names begin with it exactly as it is written: of names with empty or
        ``.`` segments, only those are found in which such a segment comes after the text.

        Raises ``InvalidSourceError``: the URI names an object and a folder.
        """
        prefix = self._uri.prefix
        if prefix and not prefix.endswith("/"):
            if found := await self._object(prefix):
                name = prefix.rpartition("/")[2]
                if name.startswith(tuple(within)):
                    yield self._file(found, name)
                return
            prefix = f"{prefix}/"
        for text in within:
            async for entry in self.objects(f"{prefix}{text}"):
                if not entry.name.endswith("/"):
                    yield self._file(entry, entry.name.removeprefix(prefix))

    async def objects(self, prefix: str, *, page: int = PAGE) -> AsyncIterator[BucketObject]:
        """The objects whose names begin with ``prefix``, in the order of their names; one request per ``page``."""
        token: str | None = None
        while True:
            listed = await self.page(prefix, page, token)
            for entry in listed.objects:
                yield entry
            if listed.following is None:
                return
            if listed.following == token:  # asking for the same page again would never end
                raise UpstreamUnavailableError(str(self._uri), "a listing goes on but does not tell where")
            token = listed.following

    async def _object(self, name: str) -> BucketObject | None:
        """The object of exactly this name. It sorts before everything that it is a prefix of, so one entry tells."""
        async for found in self.objects(name, page=1):
            if found.name != name:
                return None
            async for below in self.objects(f"{name}/"):
                if not below.name.endswith("/"):
                    uri = str(self._uri)
                    raise InvalidSourceError(
                        uri, f"{uri} is both an object and a folder; add a slash for the folder: {uri}/"
                    )
            return found
        return None

    def _file(self, entry: BucketObject, name: str) -> UpstreamFile:
        size = (str(entry.size),) if self.is_size_in_identity else ()
        identity = Identity.of(self._scope, *self._place, entry.name, entry.version, *size)
        return UpstreamFile(listed_path(name), entry.size, identity, entry.name, entry.version, entry.checksum)
