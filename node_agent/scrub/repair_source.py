"""Where a repair gets the right bytes: this node's own tiers, else the sources of any fill, with a grant that a job left here."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.cache.index import Holder
from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, PlacedChunk, digest_of
from bdn.core.errors import BdnError, GrantInvalidError, InternalError, NotFoundError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.transfer.byte_threads import BufferPool
from bdn.transfer.chunk_readers import ChunkReader, fetch
from bdn.wire.layout_form import Layout
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import in_thread, to_the_end
from node_agent.cache.records import ManifestRecords
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fill.provision import FillRequest, Provision
from node_agent.scrub.findings import single_chunk
from node_agent.stage.stage import StageRegistry
from node_agent.trust import Trust


@dataclass(frozen=True)
class RepairGrants:
    """Grants of stages that this node knows, and of commands that are being carried out.

    Stages of jobs that have ended count as well: a grant is good until it expires, and what it names is still held here.
    ``is_open`` says that the mirror asks nobody for grants; then an expired one does as well.
    """

    registry: StageRegistry
    trust: Trust
    is_open: bool
    _borrowed: list[str] = field(default_factory=list)

    @contextmanager
    def using(self, grants: Sequence[str]) -> Iterator[None]:
        """Use these as well until the block ends."""
        self._borrowed.extend(grants)
        try:
            yield
        finally:
            for grant in grants:
                self._borrowed.remove(grant)

    def find(self, manifests: Collection[Digest]) -> tuple[Digest, str]:
        """One of these manifests, and a grant that allows it.

        Raises:
            GrantInvalidError: there is none.
        """
        for token in self._borrowed:
            if (named := self._valid(token, manifests)) is not None:
                return named, token
        known = [
            (manifest, stage.record.grant)
            for stage in self.registry.all()
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


@dataclass(frozen=True)
class KnownLayouts:
    """The layouts beside held manifests; the one used last is kept in memory. Blocking; any thread."""

    records: ManifestRecords
    _last: dict[Digest, Layout | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, content: Digest, size: int, manifests: Collection[Digest]) -> FileLayout | None:
        """The layout of a content that these manifests name; None when no layout here has its chunks."""
        if size <= CHUNK_SIZE:
            return single_chunk(content, size)
        for manifest in manifests:
            layout = self._layout(manifest)
            if layout is not None and (found := layout.files.get(content)) is not None:
                return found
        return None

    def _layout(self, manifest: Digest) -> Layout | None:
        with self._lock:
            if manifest not in self._last:
                self._last.clear()
                self._last[manifest] = self.records.load_layout(manifest)
            return self._last[manifest]


Put = Callable[[memoryview], None]
_HOLDER: Final = Holder("scrub", "scrub")


@dataclass(frozen=True)
class RepairSource:
    """Obtains single chunks and whole files with the priority of a scrub. ``stop`` ends what is under way."""

    provision: Provision
    grants: RepairGrants
    layouts: KnownLayouts
    buffers: BufferPool
    stop: threading.Event

    async def layout(self, content: Digest, size: int) -> FileLayout | None:
        """Which chunks a file should have; None when neither this disk nor the mirror tells."""
        names = self.provision.cache.index.named_by(content)
        known = await in_thread(self.layouts.find, content, size, names)
        if known is None:
            with suppress(BdnError):  # then it can still be said whether the whole is right
                return (await self._open(content))[0]
        return known

    async def fetch(self, content: Digest, chunk: PlacedChunk, put: Put) -> None:
        """Give the verified chunk of a file to ``put``, which is called in a thread.

        Raises:
            BdnError: the chunk cannot be obtained, or what ``put`` raises.
        """
        if await in_thread(self._read_held, chunk, put):
            return
        file, reader = await self._open(content)
        size = file.slice.slab_size if file.slice else chunk.range.size
        async with self.provision.bandwidth.turn(TrafficClass.SCRUB, size):
            await in_thread(self._fetch, file, reader, chunk, put)

    async def refill(self, content: Digest) -> None:
        """Fill a file again, for a manifest that lacks nothing else: the rest of other manifests nobody wants now.

        The manifest is leased meanwhile. One at a time.

        Raises:
            NotFoundError: there is no such manifest. The next stage fills the content with all that its manifest lacks.
            BdnError: it cannot be obtained.
        """
        index = self.provision.cache.index
        named = [manifest for manifest in index.named_by(content) if index.is_complete_but_for(manifest, content)]
        if not named:
            raise NotFoundError(f"a manifest here that lacks {content} and nothing else")
        manifest, grant = self.grants.find(named)
        index.leases.take(manifest, _HOLDER)  # at once: evicted before it is admitted, all of it would be filled again
        try:
            await self.provision.run(FillRequest([manifest], grant, _HOLDER, TrafficClass.SCRUB, lambda *_: _Nobody()))
        finally:
            await to_the_end(self.provision.cache.leave(_HOLDER.stage_id))

    def _read_held(self, chunk: PlacedChunk, put: Put) -> bool:
        with self.buffers.take(chunk.range.size) as buffer:
            if self.provision.cache.chunks.read_held(chunk.digest, buffer) is None:
                return False
            put(buffer)
            return True

    async def _open(self, content: Digest) -> tuple[FileLayout, ChunkReader]:
        provision = self.provision
        manifest, bearer = self.grants.find(provision.cache.index.named_by(content))
        held = await provision.catalogue.obtain(manifest, bearer, is_complete=False)
        file = held.file_layouts(frozenset((content,)))[content]
        assert held.layout is not None  # noqa: S101 - asked for
        peers = provision.chain.peers
        routing, budget = Routing(held.layout, peers.members), RetryBudget(file.size, peers.avoided)
        return file, provision.chain.of_fill(FillContext(manifest, bearer, routing, budget), self.stop)

    def _fetch(self, file: FileLayout, reader: ChunkReader, chunk: PlacedChunk, put: Put) -> None:
        """A small file is cut out of its slab, which travels whole."""
        place = file.slice
        if place is None:
            with self.buffers.take(chunk.range.size) as buffer:
                fetch(reader, chunk.digest, buffer, lambda: put(buffer))
            return
        with self.buffers.take(place.slab_size) as slab:
            piece = slab[place.offset : place.offset + file.size]

            def cut() -> None:
                if digest_of(piece) != chunk.digest:
                    raise InternalError(f"the layout of file {file.digest} is wrong: it does not lie in {place}")
                put(piece)

            fetch(reader, place.slab, slab, cut)


class _Nobody:
    """Watches no progress."""

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        pass

    def restart(self, file: Digest) -> None:
        pass

    def finish(self, file: Digest, size: int) -> None:
        pass
