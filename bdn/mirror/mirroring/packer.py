"""Copy a parcel of small files: fetched one after the other into one buffer, which becomes one object in the store.

An event loop's turn, a sync and a rename for each of a million files would take hours; so a whole parcel is one trip to a
thread, and costs the store what one chunk costs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bdn.core.chunk import ByteRange
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import AuthRequiredError, BdnError, ChecksumMismatchError
from bdn.core.layout import FileLayout, Slab
from bdn.core.ports import ChunkStore, Location
from bdn.mirror.mirroring.located import LocatedFile
from bdn.mirror.mirroring.whole_check import check_at_once
from bdn.mirror.politeness.budget import Slot
from bdn.mirror.politeness.budgets import UpstreamBudgets
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest

PackedFile = Callable[[LocatedFile, FileLayout, Slab], None]
WrongContent = Callable[[LocatedFile, Digest], None]


@dataclass(frozen=True, slots=True)
class _Packing:
    """What one trip brought: the slab with the first files of the parcel, and what stopped it before the end."""

    slab: Slab | None
    layouts: tuple[FileLayout, ...]
    failure: BdnError | None
    evidence: Digest | None = None  # where the failure is wrong content: what came


@dataclass(frozen=True)
class Packer:
    """Packs parcels with shared threads, connections and store."""

    store: ChunkStore
    ranges: RangedReader
    threads: ByteThreads
    budgets: UpstreamBudgets

    async def pack(self, parcel: Sequence[LocatedFile], on_packed: PackedFile, on_wrong: WrongContent) -> None:
        """Make every file of the parcel durable in the store.

        An interruption makes a smaller slab of what arrived, and another one of the rest: nothing is fetched twice.

        Args:
            parcel: files of one scope that fit one chunk together, none of them empty.
            on_packed: told of each file once it is durable.
            on_wrong: told of the file that came with the wrong content, and under which name that is kept.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: what was told of stays stored.
        """
        left = list(parcel)
        refused: LocatedFile | None = None

        async def bring_some() -> BdnError | None:
            nonlocal refused
            locations = [await located.location() for located in left]
            packing = await self._trip(left, locations)
            if packing.slab is not None:
                for located, layout in zip(left, packing.layouts, strict=False):
                    on_packed(located, layout, packing.slab)
                del left[: len(packing.layouts)]
            failure = packing.failure
            if isinstance(failure, LocationRefusedError):
                if left[0] is refused:  # a fresh location was refused as well
                    raise AuthRequiredError(failure.source, failure.reason) from None
                refused = left[0]
                await refused.location(refused=locations[-len(left)])
                return None
            if packing.evidence is not None:
                on_wrong(left[0], packing.evidence)
            if failure is not None and not (failure.transient and packing.layouts):
                raise failure
            return failure

        while left:
            interruption = await left[0].patience.run(bring_some, left[0].allowance)
            if interruption is not None:
                await left[0].patience.wait_out(interruption, left[0].allowance)

    async def _trip(self, parcel: Sequence[LocatedFile], locations: Sequence[Location]) -> _Packing:
        stop = threading.Event()
        size = sum(located.file.size for located in parcel)
        async with self.budgets.of(locations[0].url).slot() as slot:
            return await self.threads.run(
                size, lambda buffer: self._fetch_all(parcel, locations, buffer, slot, stop), on_cancel=stop.set
            )

    def _fetch_all(
        self,
        parcel: Sequence[LocatedFile],
        locations: Sequence[Location],
        buffer: memoryview,
        slot: Slot,
        stop: threading.Event,
    ) -> _Packing:
        offset = 0
        digests: list[Digest] = []
        failure: BdnError | None = None
        part = buffer[:0]
        for located, location in zip(parcel, locations, strict=True):
            if stop.is_set() or not slot.is_open:  # nobody waits any more, or the host asked for a pause
                break
            part = buffer[offset : offset + located.file.size]
            try:
                digests.append(self._fetch(located, location, part, slot, stop))
            except BdnError as error:
                failure = error
                break
            offset += len(part)
        evidence = None
        if isinstance(failure, ChecksumMismatchError):
            evidence = self._put(part)
        if not digests:
            return _Packing(None, (), failure, evidence)
        slab = Slab(self._put(buffer[:offset]), offset, parcel[0].file.identity.scope)
        return _Packing(slab, _layouts(digests, parcel, slab), failure, evidence)

    def _put(self, content: memoryview) -> Digest:
        digest = digest_of(content)
        self.store.put(digest, content)
        return digest

    def _fetch(
        self, located: LocatedFile, location: Location, buffer: memoryview, slot: Slot, stop: threading.Event
    ) -> Digest:
        file = located.file
        request = RangeRequest(located.name, file.path, ByteRange(0, file.size), file.size)
        with slot.asking() as asked:
            stated = self.ranges.read_into(location, request, buffer, lambda: not stop.is_set())
            asked.size = len(buffer)
        expected = file.checksum or location.checksum or stated
        if expected is not None:
            check_at_once(expected, buffer, located.subject)
        return digest_of(buffer)


def _layouts(digests: Sequence[Digest], parcel: Sequence[LocatedFile], slab: Slab) -> tuple[FileLayout, ...]:
    layouts: list[FileLayout] = []
    offset = 0
    for digest, located in zip(digests, parcel, strict=False):
        layouts.append(FileLayout.packed(digest, located.file.size, slab, offset))
        offset += located.file.size
    return tuple(layouts)
