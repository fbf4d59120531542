"""Copy a parcel of small files: fetched one after the other into one buffer, which becomes one object in the store.

An event loop's turn, a sync and a rename for each of a million files would take hours; so a whole parcel is one trip to a
thread, and costs the store what one chunk costs.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from bdn.core.chunk import ByteRange
from bdn.core.digest import Digest, digest_of
from bdn.core.errors import AuthRequiredError, BdnError, ChecksumMismatchError
from bdn.core.ports import ChunkStore, Location
from bdn.core.store.layout import FileLayout, Slab
from bdn.core.store.slabs import SEAL_SIZE, seal_of
from bdn.mirror.ingest.whole_check import check_at_once
from bdn.mirror.upstream.budget import Slot
from bdn.mirror.upstream.budgets import UpstreamBudgets
from bdn.mirror.upstream.located_file import LocatedFile
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest

PackedFile = Callable[[LocatedFile, FileLayout, Slab], None]
WrongContent = Callable[[LocatedFile, Digest, ChecksumMismatchError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Packing:
    """What one trip brought: the slab with the first files of the parcel, and what stopped it before the end."""

    slab: Slab | None
    layouts: tuple[FileLayout, ...]
    failure: BdnError | None
    wrong: tuple[Digest, ChecksumMismatchError] | None = None  # where the failure is wrong content: what came


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
            on_wrong: told of a file that came with the wrong content, and under which name that is kept. It is asked for
                once more: a wire may flip a bit, and twice wrong is not chance.

        Raises:
            UpstreamError, AuthRequiredError, StoreUnavailableError: what was told of stays stored.
        """
        left = list(parcel)
        refused: LocatedFile | None = None
        wrong: LocatedFile | None = None

        async def bring_some() -> _Packing:
            nonlocal refused
            locations = [await located.location() for located in left]
            packing = await self._trip(left, locations)
            if packing.slab is not None:
                for located, layout in zip(left, packing.layouts, strict=False):
                    on_packed(located, layout, packing.slab)
                del left[: len(packing.layouts)]
            failure = packing.failure
            if isinstance(failure, LocationRefusedError):
                refused = await _move(left[0], refused, locations[-len(left)], failure)
                return replace(packing, failure=None)
            if failure is not None and packing.wrong is None and not (failure.transient and packing.layouts):
                raise failure
            return packing

        while left:
            packing = await left[0].patience.run(bring_some, left[0].allowance)
            if packing.wrong is not None:
                await on_wrong(left[0], *packing.wrong)
                if left[0] is wrong:
                    raise packing.wrong[1]
                wrong = left[0]
            elif packing.failure is not None:
                await left[0].patience.wait_out(packing.failure, left[0].allowance)

    async def _trip(self, parcel: Sequence[LocatedFile], locations: Sequence[Location]) -> _Packing:
        stop = threading.Event()
        size = sum(located.file.size for located in parcel) + SEAL_SIZE
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
        wrong = None
        if isinstance(failure, ChecksumMismatchError):
            wrong = self._put(part), failure
        if not digests:
            return _Packing(None, (), failure, wrong)
        scope = parcel[0].file.identity.scope
        seal = seal_of(scope)
        content = buffer[: offset + len(seal)]
        content[offset:] = seal
        slab = Slab(self._put(content), len(content), scope)
        return _Packing(slab, _layouts(digests, parcel, slab), failure, wrong)

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


async def _move(
    located: LocatedFile, refused: LocatedFile | None, location: Location, error: LocationRefusedError
) -> LocatedFile:
    """Ask where the file lies now. Returns it: a fresh location that is refused as well is a refusal."""
    if located is refused:
        raise AuthRequiredError(error.source, error.reason) from None
    await located.location(refused=location)
    return located


def _layouts(digests: Sequence[Digest], parcel: Sequence[LocatedFile], slab: Slab) -> tuple[FileLayout, ...]:
    layouts: list[FileLayout] = []
    offset = 0
    for digest, located in zip(digests, parcel, strict=False):
        layouts.append(FileLayout.packed(digest, located.file.size, slab, offset))
        offset += located.file.size
    return tuple(layouts)
