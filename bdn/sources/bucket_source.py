"""Buckets as sources, whatever their kind: a folder, the whole bucket, or one object."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from bdn.core.errors import InvalidSourceError, UpstreamUnavailableError
from bdn.core.source.upstream import Checksum, Identity, Location, Resolution, UpstreamFile, listed_path
from bdn.core.source.uri import BucketUri
from bdn.core.store import scope_of

PAGE: Final = 1000  # objects per request, the most that any service returns


@dataclass(frozen=True, slots=True)
class BucketObject:
    """``size`` is in bytes, ``version`` pins these bytes for a read, ``modified`` is the service's own text."""

    name: str
    size: int
    version: str
    checksum: Checksum | None = None
    modified: str = field(default="", compare=False)  # text: sources do not parse it, and some have a million objects


@dataclass(frozen=True, slots=True)
class BucketPage:
    """Objects in the order of their names, and the token of the next page, None on the last one."""

    objects: tuple[BucketObject, ...]
    following: str | None


class NotAListingError(ValueError):
    """The answer is not a listing. The text says why, without any content of the answer."""


class BucketSource(ABC):
    """A listing costs one request per 1000 objects. Resolving costs none: buckets have no revisions.

    Args:
        uri: the bucket and prefix. A prefix without a final slash may name an object; only the listing shows whether it
            does.
        reader: the only organisation or team that may find the content again by its listing.
        place: where the bucket is; identities begin with it.
    """

    is_size_in_identity: ClassVar[bool]  # changes every identity that a database holds

    def __init__(self, uri: BucketUri, reader: str, *place: str) -> None:
        self._uri = uri
        self._scope = scope_of(reader)
        self._place = (*place, uri.bucket)

    @abstractmethod
    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:
        """Up to ``limit`` objects whose names begin with ``prefix``, after the page that returned ``token``."""

    @abstractmethod
    async def locate(self, file: UpstreamFile) -> Location: ...

    async def resolve(self) -> Resolution:
        """No request: the first page of the listing shows whether the bucket exists and may be read."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """Yield every object except folder markers, whose names end with a slash.

        Sends one listing for each text of ``within``; names begin with the text exactly as written. Names with empty or
        ``.`` segments are found only if such a segment comes after the text.

        Raises ``InvalidSourceError``: the URI names both an object and a folder.
        """
        prefix = self._uri.prefix
        if prefix and not prefix.endswith("/"):
            if found := await self._only(prefix):
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
        """The objects whose names begin with ``prefix``, in order of name; one request per ``page`` objects."""
        token: str | None = None
        while True:
            listed = await self.page(prefix, page, token)
            for entry in listed.objects:
                yield entry
            if listed.following is None:
                return
            if listed.following == token:  # requesting the same page again would loop
                raise UpstreamUnavailableError(
                    str(self._uri), "a listing is truncated, and repeats its continuation token"
                )
            token = listed.following

    async def named(self, name: str) -> BucketObject | None:
        """The object with exactly this name, which sorts before all names that it prefixes: one entry suffices."""
        async for found in self.objects(name, page=1):
            return found if found.name == name else None
        return None

    async def _only(self, name: str) -> BucketObject | None:
        """The object with this name, unless there is none. Raises ``InvalidSourceError``: there is a folder, too."""
        if (found := await self.named(name)) is None:
            return None
        async for below in self.objects(f"{name}/"):
            if not below.name.endswith("/"):
                uri = str(self._uri)
                raise InvalidSourceError(
                    uri, f"{uri} is both an object and a folder; add a slash for the folder: {uri}/"
                )
        return found

    def _file(self, entry: BucketObject, name: str) -> UpstreamFile:
        size = (str(entry.size),) if self.is_size_in_identity else ()
        identity = Identity.of(self._scope, *self._place, entry.name, entry.version, *size)
        return UpstreamFile(listed_path(name), entry.size, identity, entry.name, entry.version, entry.checksum)
