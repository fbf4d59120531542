"""Which chunks a manifest names, for an owner that obtains them because peers ask."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.manifest import Root
from node_agent.background_tasks import in_thread
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Sizes = Mapping[Digest, int]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ChunkLists:
    """Sizes of pages and of other chunks, of the manifests that were asked for last. ``known`` may be called from any thread.

    A manifest is obtained with a peer's grant, which proves that the peer may read it. Which pages it has, its root tells, which
    comes from the mirror: an owner that is asked for a page waits for no other owner.
    """

    catalogue: Catalogue
    _roots: dict[Digest, Root] = field(default_factory=dict)  # the one used last is the last
    _chunks: dict[Digest, _Sizes] = field(default_factory=dict)
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, chunk: Digest) -> bool:
        """Whether the manifest is known to name the chunk."""
        root = self._roots.get(manifest)
        return chunk in self._chunks.get(manifest, ()) or (root is not None and _page_size(root, chunk) is not None)

    async def size(self, manifest: Digest, chunk: Digest, bearer: str) -> int:
        """Of a chunk that the manifest names.

        Raises:
            NotFoundError: it names no such chunk, or does not exist for this bearer.
            BdnError: why the manifest cannot be had.
        """
        root = await self._once(self._roots, manifest, lambda: self.catalogue.root(manifest, bearer))
        if (size := _page_size(root, chunk)) is not None:
            return size
        if (size := (await self._once(self._chunks, manifest, lambda: self._read(root, bearer))).get(chunk)) is None:
            raise NotFoundError(f"chunk {chunk}")
        return size

    async def _read(self, root: Root, bearer: str) -> _Sizes:
        held = await self.catalogue.read(root, bearer)
        return await in_thread(lambda: dict(held.layout.files.chunks()))

    async def _once(
        self, known: dict[Digest, _Value], manifest: Digest, read: Callable[[], Awaitable[_Value]]
    ) -> _Value:
        """One request for all who ask at the same time."""
        key = manifest, known is self._roots
        while (found := known.pop(manifest, None)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                known[manifest] = await read()
        known[manifest] = found
        while len(known) > _REMEMBERED:
            del known[next(iter(known))]
        return found


def _page_size(root: Root, page: Digest) -> int | None:
    return next((one.size for one in root.pages if one.digest == page), None)
