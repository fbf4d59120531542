"""What of a bucket a source is: a folder, everything, or one object. The same for every kind of bucket."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from bdn.core.chunk import UnsafePathError, normalise_path
from bdn.core.errors import InvalidSourceError
from bdn.core.source.uri import BucketUri

PAGE: Final = 1000  # objects per request, the most that anybody gives


class BucketObject(Protocol):
    """One listed object."""

    @property
    def name(self) -> str:
        """Its key."""
        ...


_Object = TypeVar("_Object", bound=BucketObject)
_Listed_co = TypeVar("_Listed_co", bound=BucketObject, covariant=True)


class Bucket(Protocol[_Listed_co]):
    """What can be listed."""

    def objects(self, prefix: str, *, page: int = PAGE) -> AsyncIterator[_Listed_co]:
        """The objects whose names begin with ``prefix``, in the order of their names; one request per ``page``."""
        ...


@dataclass(frozen=True)
class BucketTree(Generic[_Object]):
    """The part of a bucket that a URI names, as paths relative to it."""

    uri: BucketUri
    bucket: Bucket[_Object]

    async def files(self, within: Sequence[str]) -> AsyncIterator[tuple[str, _Object]]:
        """Every object with its path; names that end with a slash mark folders and are left out.

        One listing for each text of ``within``, whose names begin with it exactly as it is written: of names with empty or
        ``.`` segments, only those are found in which such a segment comes after the text.

        Raises:
            InvalidSourceError: a name cannot be a path, or the URI names an object and a folder.
        """
        prefix = self.uri.prefix
        if prefix and not prefix.endswith("/"):
            if found := await self._object(prefix):
                name = prefix.rpartition("/")[2]
                if name.startswith(tuple(within)):
                    yield self._path(name), found
                return
            prefix = f"{prefix}/"
        for text in within:
            async for entry in self.bucket.objects(f"{prefix}{text}"):
                if not entry.name.endswith("/"):
                    yield self._path(entry.name.removeprefix(prefix)), entry

    async def _object(self, name: str) -> _Object | None:
        """The object of exactly this name. It sorts before everything that it is a prefix of, so one entry tells."""
        async for found in self.bucket.objects(name, page=1):
            if found.name != name:
                return None
            async for below in self.bucket.objects(f"{name}/"):
                if not below.name.endswith("/"):
                    uri = str(self.uri)
                    raise InvalidSourceError(
                        uri, f"{uri} is both an object and a folder; add a slash for the folder: {uri}/"
                    )
            return found
        return None

    def _path(self, name: str) -> str:
        try:
            return normalise_path(name)
        except UnsafePathError as error:
            raise InvalidSourceError(str(self.uri), f"{self.uri} cannot become a tree of files: {error}") from error
