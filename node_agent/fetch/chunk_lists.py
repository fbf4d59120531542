"""Which chunks a manifest names, for an owner that obtains them because peers ask."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from node_agent.background_tasks import in_thread
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Sizes = Mapping[Digest, int]


class _Lists(dict[Digest, _Sizes]):
    """The lists that were asked for last; the one used last is the last."""

    def remember(self, manifest: Digest, sizes: _Sizes) -> None:
        self.pop(manifest, None)
        self[manifest] = sizes
        while len(self) > _REMEMBERED:
            del self[next(iter(self))]


@dataclass(frozen=True)
class ChunkLists:
    """Sizes of the pages and of the other chunks of manifests. ``known`` may be called from any thread.

    A manifest is obtained with a peer's grant, which proves that the peer may read it. Whether a page is the manifest's, the root
    alone tells, and that comes from the mirror: an owner that is asked for a page waits for no other owner.
    """

    catalogue: Catalogue
    _pages: _Lists = field(default_factory=_Lists)
    _chunks: _Lists = field(default_factory=_Lists)
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, chunk: Digest) -> bool:
        """Whether the manifest is known to name the chunk."""
        return any(chunk in lists.get(manifest, ()) for lists in (self._pages, self._chunks))

    async def size(self, manifest: Digest, chunk: Digest, bearer: str) -> int:
        """Of a chunk that the manifest names.

        Raises:
            NotFoundError: it names no such chunk, or does not exist for this bearer.
            BdnError: why the manifest cannot be had.
        """
        pages = await self._list(self._pages, manifest, partial(self._read_pages, manifest, bearer))
        if (size := pages.get(chunk)) is not None:
            return size
        chunks = await self._list(self._chunks, manifest, partial(self._read_chunks, manifest, bearer))
        if (size := chunks.get(chunk)) is None:
            raise NotFoundError(f"chunk {chunk}")
        return size

    async def _list(self, lists: _Lists, manifest: Digest, read: Callable[[], Awaitable[_Sizes]]) -> _Sizes:
        """One request for all who ask at the same time."""
        key = manifest, lists is self._pages
        while (known := lists.get(manifest)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                lists.remember(manifest, await read())
        lists.remember(manifest, known)
        return known

    async def _read_pages(self, manifest: Digest, bearer: str) -> _Sizes:
        return {page.digest: page.size for page in (await self.catalogue.root(manifest, bearer)).pages}

    async def _read_chunks(self, manifest: Digest, bearer: str) -> _Sizes:
        held = await self.catalogue.obtain(manifest, bearer, is_complete=False)
        return await in_thread(lambda: dict(held.layout.files.chunks()))
