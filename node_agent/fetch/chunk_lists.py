"""Which chunks a manifest names, and their sizes, for an owner that obtains chunks for peers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.core.manifest import Root
from bdn.disk.threads import in_thread
from node_agent.fetch.documents import Catalogue
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Sizes = Mapping[Digest, int]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ChunkLists:
    """Sizes of pages and other chunks of the manifests requested last. ``known`` is thread-safe.

    A manifest is obtained with a peer's grant, which proves that the peer may read it. The root lists the pages, and
    comes from the mirror: a request for a page never waits for another owner.
    """

    catalogue: Catalogue
    _roots: dict[Digest, Root] = field(default_factory=dict)  # in order of use, the last used at the end
    _chunks: dict[Digest, _Sizes] = field(default_factory=dict)
    _asking: ReadsInProgress = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, chunk: Digest) -> bool:
        root = self._roots.get(manifest)
        return chunk in self._chunks.get(manifest, ()) or (root is not None and _page_size(root, chunk) is not None)

    async def size(self, manifest: Digest, chunk: Digest, bearer: str) -> int:
        """Size of a chunk that the manifest names.

        Raises:
                NotFoundError: the manifest does not name the chunk, or does not exist for this bearer.
                BdnError: the manifest cannot be obtained.
        """
        root = await self._once(self._roots, manifest, lambda: self.catalogue.root(manifest, bearer))
        if (size := _page_size(root, chunk)) is not None:
            return size
        if (size := (await self._once(self._chunks, manifest, lambda: self._read(root, bearer))).get(chunk)) is None:
            raise NotFoundError(f"chunk {chunk}")
        return size

    async def _read(self, root: Root, bearer: str) -> _Sizes:
        held = await self.catalogue.read(root, bearer)
        return await in_thread(lambda: dict(held.layout.chunks()))

    async def _once(
        self, known: dict[Digest, _Value], manifest: Digest, read: Callable[[], Awaitable[_Value]]
    ) -> _Value:
        key = manifest, known is self._roots
        while (found := known.pop(manifest, None)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # always leads: no other task ran on the loop since ``flight``
                known[manifest] = await read()
        known[manifest] = found
        while len(known) > _REMEMBERED:
            del known[next(iter(known))]
        return found


def _page_size(root: Root, page: Digest) -> int | None:
    return next((one.size for one in root.pages if one.digest == page), None)
