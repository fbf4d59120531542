"""Buckets of a Hugging Face hub: listings by the beginnings of names, bytes from the hub's own addresses, never by xet."""

import re
from typing import ClassVar, Final
from urllib.parse import quote

from huggingface_hub import BucketFile
from huggingface_hub.errors import RemoteEntryNotFoundError

from bdn.core.errors import SourceChangedError, UpstreamUnavailableError
from bdn.core.source.upstream import Location, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.sources.bucket_source import BucketObject, BucketPage, BucketSource
from bdn.sources.huggingface.requests import HubRequests
from bdn.sources.huggingface.tree import read_entries

_XET_HASH: Final = re.compile(r"[0-9a-fA-F]{64}")


class HubBucketSource(BucketSource):
    """The version of a file is its xet hash, which depends on the bytes alone: a file uploaded again is unchanged.

    The hub states no checksum of a bucket's file that could be compared with the bytes.
    """

    is_size_in_identity: ClassVar[bool] = False

    def __init__(self, uri: BucketUri, reader: str, hub: HubRequests) -> None:
        super().__init__(uri, reader, "hf", hub.endpoint, "bucket", uri.account)
        self._hub = hub
        self._bucket_id = f"{uri.account}/{uri.bucket}"

    async def page(self, prefix: str, limit: int, token: str | None) -> BucketPage:  # noqa: ARG002 - the hub decides
        """One request, like those of ``HfApi.list_bucket_tree``; ``token`` is the address of the page."""
        root = f"{self._hub.endpoint}/api/buckets/{self._bucket_id}/tree"
        # "." and ".." would be segments of the path, and the whole bucket is listed instead.
        below = f"/{quote(prefix, safe='')}" if prefix.strip(".") else ""

        def read() -> BucketPage:
            address = token or f"{root}{below}?recursive=true"
            try:
                entries, following = read_entries(address, self._hub.headers(), self._hub.endpoint)
            except RemoteEntryNotFoundError:  # no name begins so
                return BucketPage((), None)
            objects = [_object(BucketFile(**entry)) for entry in entries if entry["type"] == "file"]  # type: ignore[no-untyped-call]
            return BucketPage(tuple(one for one in objects if one.name.startswith(prefix)), following)

        return await self._hub.call(read)

    async def named(self, name: str) -> BucketObject | None:
        def read() -> BucketObject | None:
            found = [_object(file) for file in self._hub.api.get_bucket_paths_info(self._bucket_id, [name])]
            return found[0] if found else None

        return await self._hub.call(read)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of the listed bytes, for one request: on a CDN, signed for about an hour, or on the hub itself.

        A CDN's address names content, so the hash in the answer that leads there pins the bytes; the hub's own
        addresses are pinned by their ETag.
        """
        url = f"{self._hub.endpoint}/buckets/{self._bucket_id}/resolve/{quote(file.handle, safe='')}"
        metadata = await self._hub.head(url, file)
        if metadata.xet_file_data is None:
            raise UpstreamUnavailableError(str(self._uri), "the answer does not look like a hub's (no X-Xet-Hash)")
        if metadata.xet_file_data.file_hash != file.version:
            raise SourceChangedError(str(self._uri), file.path, "its xet hash changed")
        if not self._hub.is_own(metadata.location):
            return self._hub.location(metadata.location)
        etag = f'"{metadata.etag}"'
        return Location(metadata.location, (*self._hub.credentials, ("If-Match", etag)), etag=etag)


def _object(file: BucketFile) -> BucketObject:
    """The SDK does not check types, so they are checked here."""
    is_file = type(file.path) is str and type(file.size) is int and file.size >= 0
    if not is_file or not file.path or _XET_HASH.fullmatch(file.xet_hash) is None:
        raise ValueError("an entry that cannot be a file")
    return BucketObject(file.path, file.size, file.xet_hash)
