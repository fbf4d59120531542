"""Which chunks belong to a manifest, for the manifests that peers ask about: what an owner may obtain, and how long it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.net.client import MirrorClient
from bdn.wire.layout_form import Layout
from node_agent.background_tasks import in_thread
from node_agent.cache.records import ManifestRecords
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB
_Key = tuple[Digest, str]  # a manifest, and the organisation whose list of it this is: each has slabs of its own


@dataclass(frozen=True)
class ChunkList:
    """The sizes of everything that travels for a manifest: chunks of files, and slabs rather than the files in them."""

    sizes: Mapping[Digest, int]
    data_port: int | None  # of the mirror's data plane; None where it serves chunks itself

    @classmethod
    def of(cls, layout: Layout) -> ChunkList:
        """From where the manifest's bytes lie. Takes a while for a million files."""
        sizes: dict[Digest, int] = {}
        for file in layout.files.values():
            if file.slice is not None:
                sizes[file.slice.slab] = file.slice.slab_size
            else:
                sizes.update((chunk.digest, chunk.range.size) for chunk in file.placed())
        return cls(sizes, layout.data_port)


@dataclass(frozen=True)
class LayoutSource:
    """Layouts from the mirror or, while that does not answer, those of the manifests that this node has staged."""

    client: MirrorClient
    records: ManifestRecords

    async def __call__(self, manifest: Digest, bearer: str | None) -> Layout:
        """The layout. Raises the mirror's error."""
        try:
            return await self.client.layout(manifest, bearer)
        except BdnError as error:
            known = await in_thread(self.records.load_layout, manifest) if error.transient else None
            if known is None:
                raise
            return known


@dataclass(frozen=True)
class ChunkLists:
    """The lists of the manifests that were asked about last. ``known`` may be called from any thread.

    ``ask`` reads a layout with a peer's grant, which proves that the peer may read the manifest and that it exists.
    """

    ask: Callable[[Digest, str | None], Awaitable[Layout]]
    _known: dict[_Key, ChunkList] = field(default_factory=dict)  # the one used last stands last
    _asking: ReadsInProgress[_Key] = field(default_factory=ReadsInProgress)

    def known(self, manifest: Digest, organisation: str) -> ChunkList | None:
        """The list, if it was obtained and is remembered."""
        return self._known.get((manifest, organisation))

    async def obtain(self, manifest: Digest, organisation: str, bearer: str | None) -> ChunkList:
        """The list; one request for all who ask at the same time.

        Raises:
            BdnError: there is no such manifest, the grant is not good for it, or nobody can be asked now.
        """
        key = manifest, organisation
        while (known := self._known.get(key)) is None:
            if (flight := self._asking.flight(key)) is not None:
                await landed(flight)
                continue
            with self._asking.lead(key):  # nobody else does: the loop has not turned since we looked
                self._remember(key, await in_thread(ChunkList.of, await self.ask(manifest, bearer)))
        self._remember(key, known)
        return known

    def _remember(self, key: _Key, known: ChunkList) -> None:
        self._known.pop(key, None)
        self._known[key] = known
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
