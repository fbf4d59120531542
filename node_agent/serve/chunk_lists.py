"""Which chunks belong to a manifest, for the manifests that peers ask about: what an owner may obtain, and how long it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import BdnError
from bdn.net.client.mirror_client import MirrorClient
from bdn.wire.layout_form import Layout
from node_agent.background_tasks import in_thread
from node_agent.cache.records import ManifestRecords
from node_agent.fetch.origin_reads import OriginReads

_REMEMBERED: Final = 16  # manifests; one of 140 GB has 17,000 chunks, which take 4 MB


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

    ``ask`` reads a layout with a peer's grant, which proves that the peer may read the manifest and that it exists. A list is
    one organisation's: each has slabs of its own.
    """

    ask: Callable[[Digest, str | None], Awaitable[Layout]]
    _known: dict[Digest, ChunkList] = field(default_factory=dict)  # the one used last stands last
    _asking: OriginReads = field(default_factory=OriginReads)  # layouts rather than chunks

    def known(self, manifest: Digest, organisation: str) -> ChunkList | None:
        """The list, if it was obtained and is remembered."""
        return self._known.get(_name(manifest, organisation))

    async def obtain(self, manifest: Digest, organisation: str, bearer: str | None) -> ChunkList:
        """The list; one request for all who ask at the same time.

        Raises:
            BdnError: there is no such manifest, the grant is not good for it, or nobody can be asked now.
        """
        name = _name(manifest, organisation)
        while (known := self._known.get(name)) is None:
            if self._asking.lead(name):
                await self._lead(name, manifest, bearer)
            elif (landing := self._asking.landing(name)) is not None:
                await others(landing)
        self._known[name] = self._known.pop(name, known)
        return known

    async def _lead(self, name: Digest, manifest: Digest, bearer: str | None) -> None:
        try:
            layout = await self.ask(manifest, bearer)
            found = await in_thread(ChunkList.of, layout)
        except BaseException as error:
            self._asking.failed(name, error)
            raise
        self._known[name] = found
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._asking.landed(name)


def _name(manifest: Digest, organisation: str) -> Digest:
    return digest_of(f"{manifest}{organisation}".encode())


async def others(landing: Future[None]) -> None:
    """Wait for somebody else's read. Whoever returns from here looks again, and may have to read for itself.

    Raises:
        BdnError: the read failed for a reason that would be ours as well, because it may pass for all: asking the mirror
            once more for each of many that wait would not make it well. A read that ended for its reader's own reasons,
            such as a grant that expired or a stage that was released, is no reason to fail.
    """
    # The future is everybody's: ``wait`` does not cancel it with one who waits. Its error is looked at below, or, by one who
    # was canceled, nowhere: asyncio is not to complain of that.
    waiter = asyncio.wrap_future(landing)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiter])
    error = landing.exception()
    if isinstance(error, BdnError) and error.transient:
        raise error
