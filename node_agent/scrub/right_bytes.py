"""Where the right bytes come from: this node's own tiers, else the sources of any fill, with a grant that some job left here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import BdnError, GrantInvalidError, InternalError, NotFoundError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.transfer.buffers import BufferPool
from bdn.transfer.chunk_readers import ChunkReader, fetch
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import in_thread, to_the_end
from node_agent.cache.held_chunks import HeldChunks
from node_agent.fetch.chain import chunk_base
from node_agent.fetch.fill_context import FillContext, RetryBudget
from node_agent.fetch.routing import Routing
from node_agent.fill.provision import FillRequest, Provision
from node_agent.stage.stage import StageRegistry
from node_agent.trust import Trust


@dataclass(frozen=True)
class Rights:
    """Grants of stages that this node knows, and of commands that are being carried out.

    Whose job has ended is asked as well: a grant is good until it expires, and what it names is still held here.
    ``is_open`` is whether the mirror asks nobody for grants; then one that has expired does as well.
    """

    book: StageRegistry
    trust: Trust
    is_open: bool
    _lent: list[str] = field(default_factory=list)

    @contextmanager
    def lent_by(self, grants: Sequence[str]) -> Iterator[None]:
        """Use these as well until the block ends."""
        self._lent.extend(grants)
        try:
            yield
        finally:
            for grant in grants:
                self._lent.remove(grant)

    def find(self, manifests: Collection[Digest]) -> tuple[Digest, str]:
        """One of these manifests, and a grant that allows it.

        Raises:
            GrantInvalidError: there is none.
        """
        for token in self._lent:
            if (named := self._valid(token, manifests)) is not None:
                return named, token
        known = [
            (manifest, stage.record.grant)
            for stage in self.book.all()
            for manifest in stage.record.manifests
            if manifest in manifests
        ]
        for manifest, token in known:
            if self._valid(token, (manifest,)) is not None:
                return manifest, token
        if known and self.is_open:
            return known[0]
        raise GrantInvalidError("no stage of this node has one that is still good for what is to be fetched")

    def _valid(self, token: str, manifests: Collection[Digest]) -> Digest | None:
        try:
            grant = self.trust.verify(token)
        except BdnError:
            return None
        return next((manifest for manifest in manifests if grant.allows(manifest)), None)


Put = Callable[[memoryview], None]


@dataclass(frozen=True)
class RightBytes:
    """Brings single chunks, with the place in the queue that a scrub has. ``stop`` ends what is under way."""

    provision: Provision
    shelf: HeldChunks
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


_HOLDER: Final = Holder("scrub", "scrub")


@dataclass(frozen=True)
class Refill:
    """Its manifest is leased while it comes, and no longer. One at a time."""

    provision: Provision
    rights: Rights

    async def bring(self, content: Digest) -> None:
        """Fill it, for a manifest that lacks nothing else: of all the others nobody wants the rest now.

        Raises:
            NotFoundError: there is no such manifest. The next stage brings the content with all that its manifest lacks.
            BdnError: it cannot be had.
        """
        index = self.provision.cache.index
        named = [manifest for manifest in index.named_by(content) if index.is_complete_but_for(manifest, content)]
        if not named:
            raise NotFoundError(f"a manifest here that lacks {content} and nothing else")
        manifest, grant = self.rights.find(named)
        index.leases.take(manifest, _HOLDER)  # at once: evicted before it is admitted, all of it would come again
        try:
            await self.provision.run(FillRequest([manifest], grant, _HOLDER, TrafficClass.SCRUB, lambda *_: _Nobody()))
        finally:
            await to_the_end(self.provision.cache.leave(_HOLDER.stage_id))


class _Nobody:
    """Watches nothing."""

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        pass

    def restart(self, file: Digest) -> None:
        pass

    def finish(self, file: Digest, size: int) -> None:
        pass
