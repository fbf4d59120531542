"""Where the right bytes of one wrong chunk come from: this node's own tiers, else what any fill would ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import InternalError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.transfer.buffers import BufferPool
from bdn.transfer.chunk_readers import ChunkReader, fetch
from node_agent.background_tasks import in_thread
from node_agent.cache.held_chunks import NodeShelf
from node_agent.fetch.chain import chunk_base
from node_agent.fetch.fill_context import FillContext, RetryBudget
from node_agent.fetch.routing import Routing
from node_agent.fill.provision import Provision
from node_agent.scrub.rights import Rights

Put = Callable[[memoryview], None]


@dataclass(frozen=True)
class RightBytes:
    """Brings single chunks, with the place in the queue that a scrub has. ``stop`` ends what is under way."""

    provision: Provision
    shelf: NodeShelf
    rights: Rights
    buffers: BufferPool
    stop: threading.Event

    async def bring(self, content: Digest, chunk: PlacedChunk, put: Put) -> None:
        """The chunk of a file, verified, to ``put``, which is called in a thread.

        Raises:
            BdnError: it cannot be had, or what ``put`` raises.
        """
        if await in_thread(self._from_here, chunk, put):
            return
        source = await self._open(content)
        lies = source.file.slice
        size = lies.slab_size if lies else chunk.range.size
        async with self.provision.filler.bandwidth.turn(TrafficClass.SCRUB, size):
            await in_thread(self._fetch, source, chunk, put)

    async def layout(self, content: Digest) -> FileLayout:
        """Where a file's bytes lie, from the mirror. Raises ``BdnError``."""
        return (await self._open(content)).file

    def _from_here(self, chunk: PlacedChunk, put: Put) -> bool:
        with self.buffers.take(chunk.range.size) as buffer:
            if self.shelf.read_held(chunk.digest, buffer) is None:
                return False
            put(buffer)
            return True

    async def _open(self, content: Digest) -> _Source:
        provision = self.provision
        manifest, bearer = self.rights.find(provision.cache.index.named_by(content))
        held = await provision.catalogue.obtain(manifest, bearer, is_complete=False)
        file = held.file_layouts(frozenset((content,)))[content]
        assert held.layout is not None  # noqa: S101 - asked for
        budget = RetryBudget(file.size, provision.peers.avoided)
        context = FillContext(manifest, bearer, Routing(held.layout, provision.members), budget)
        base_url = chunk_base(provision.mirror_url, held.layout.data_port)
        return _Source(file, provision.chain.of_fill(base_url, context, self.stop))

    def _fetch(self, source: _Source, chunk: PlacedChunk, put: Put) -> None:
        """A small file is cut out of its slab, which travels whole."""
        lies = source.file.slice
        if lies is None:
            with self.buffers.take(chunk.range.size) as buffer:
                fetch(source.reader, chunk.digest, buffer, lambda: put(buffer))
            return
        with self.buffers.take(lies.slab_size) as slab:
            piece = slab[lies.offset : lies.offset + source.file.size]

            def cut() -> None:
                if digest_of(piece) != chunk.digest:
                    raise InternalError(f"the layout of file {source.file.digest} is wrong: it does not lie in {lies}")
                put(piece)

            fetch(source.reader, lies.slab, slab, cut)


@dataclass(frozen=True)
class _Source:
    file: FileLayout
    reader: ChunkReader
