"""Which chunks a manifest names, for an owner that obtains them because peers ask."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from node_agent.background_tasks import in_thread
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Sizes = Mapping[Digest, int]


@dataclass(frozen=True)
class ChunkLists:
    """Sizes of the pages, and of the other chunks, of the manifests that were asked for last. ``known`` may be called from any thread.

    A manifest is obtained with a peer's grant, which proves that the peer may read it. Which pages it has, its root tells, which
    comes from the mirror: an owner that is asked for a page waits for no other owner.
    """

    catalogue: Catalogue
    _pages: dict[Digest, _Sizes] = field(default_factory=dict)  # the one used last is the last
    _chunks: dict[Digest, _Sizes] = field(default_factory=dict)
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, chunk: Digest) -> bool:
        """Whether the manifest is known to name the chunk."""
        return chunk in self._pages.get(manifest, ()) or chunk in self._chunks.get(manifest, ())

    async def size(self, manifest: Digest, chunk: Digest, bearer: str) -> int:
        """Of a chunk that the manifest names.

        Raises:
            NotFoundError: it names no such chunk, or does not exist for this bearer.
            BdnError: why the manifest cannot be had.
        """

        async def pages() -> _Sizes:
            return {page.digest: page.size for page in (await self.catalogue.root(manifest, bearer)).pages}

        async def chunks() -> _Sizes:
            held = await self.catalogue.read(await self.catalogue.root(manifest, bearer), bearer)
            return await in_thread(lambda: dict(held.layout.files.chunks()))

        for lists, read in ((self._pages, pages), (self._chunks, chunks)):
            if (size := (await self._list(lists, manifest, read)).get(chunk)) is not None:
                return size
        raise NotFoundError(f"chunk {chunk}")

    async def _list(
        self, lists: dict[Digest, _Sizes], manifest: Digest, read: Callable[[], Awaitable[_Sizes]]
    ) -> _Sizes:
        """One request for all who ask at the same time."""
        key = manifest, lists is self._pages
        while (known := lists.pop(manifest, None)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                lists[manifest] = await read()
        lists[manifest] = known
        while len(lists) > _REMEMBERED:
            del lists[next(iter(lists))]
        return known
