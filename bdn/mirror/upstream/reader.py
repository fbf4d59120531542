"""Reads ranges of upstream files. Copying, packing and repair share its rules for failures.

- A temporary failure is retried, as the retry policy and the file's rounds of failures permit.
- A refused location is requested anew, once: signed URLs expire in the middle of a long file.
- Wrong content is read once more: a bit may flip on the wire. If it is wrong again, the upstream has it wrong.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from bdn.core.chunk import ByteRange, chunk_count
from bdn.core.errors import AuthRequiredError, BdnError, ChecksumMismatchError, UpstreamError
from bdn.core.pace.retry import FailureRounds, Outage
from bdn.core.source.upstream import Checksum, Location, Locator, UpstreamFile
from bdn.mirror.upstream.budget import BudgetSlot
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.in_order import InOrderReader
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from bdn.transfer.under_way import Arriving

_MARGIN_SECONDS: Final = 60.0  # a range requested now is still being sent then


@dataclass
class LocatedFile:
    """A file of an open source. Its location is requested once, and again when it is refused or about to expire."""

    name: str  # of the source, for messages
    source: Locator
    file: UpstreamFile
    clock: Callable[[], float] = time.time
    rounds: FailureRounds = field(init=False)  # failures forgiven over all its requests
    _location: Location | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.rounds = FailureRounds.of(chunk_count(self.file.size))

    @property
    def subject(self) -> str:
        return f"{self.file.path!r} of {self.name}"

    async def location(self, refused: Location | None = None) -> Location:
        """The current location; a fresh one if ``refused`` is still the current one."""
        async with self._lock:
            current = self._location
            if current is None or current is refused or self._is_expiring(current):
                current = self._location = await self.source.locate(self.file)
            return current

    def _is_expiring(self, location: Location) -> bool:
        return location.expires_at is not None and self.clock() + _MARGIN_SECONDS >= location.expires_at


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, and the consumer of its content.

    ``accept`` is called in a byte thread with the content and with the checksum that the upstream states for the whole
    file, if any. It raises ``ChecksumMismatchError`` for wrong content.
    """

    located: LocatedFile
    range: ByteRange
    accept: Callable[[memoryview, Checksum | None], None]


OnWrong = Callable[[LocatedFile, bytes, ChecksumMismatchError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The result of one visit to a byte thread: how many of the wanted ranges arrived, and the failure that ended it.

    ``sent`` is when the last request was sent, by the clock of the budgets.
    """

    arrived: int
    sent: float
    failure: BdnError | None = None
    location: Location | None = None  # of the range that failed
    content: bytes = b""  # of the failed range, if wrong


@dataclass(frozen=True)
class UpstreamReader:
    """Reads with shared connections, byte threads and budgets of requests."""

    ranges: RangedReader
    threads: ByteThreads
    retries: UpstreamRetries
    _in_order: InOrderReader | None = None

    @property
    def ranges_at_once(self) -> int:
        """How many ranges of one file may be read concurrently."""
        return self.threads.count if self._in_order is None else 1

    @contextmanager
    def in_order(self) -> Iterator[UpstreamReader]:
        """A reader for one file of a server that ignores ``Range``: one range at a time, in order."""
        with InOrderReader(self.ranges) as in_order:
            yield replace(self, _in_order=in_order)

    async def read(
        self,
        wanted: Sequence[FileRange],
        *,
        on_wrong: OnWrong | None = None,
        on_cancel: Callable[[], None] | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        """Read every range. Several are read in sequence into one buffer, in one visit to a byte thread.

        An interruption ends the visit; the remaining ranges begin another visit. Only wrong content is read twice.

        Args:
            wanted: ranges that fit one buffer together.
            on_wrong: called with content that ``accept`` rejected. Without it, such content is not read again.
            on_cancel: makes ``accept`` return early, because cancellation waits for the byte thread.
            arriving: counts bytes that arrived and are not accounted for elsewhere; a repeated read resets the count.

        Raises:
            UpstreamError, AuthRequiredError: ranges that arrived before were accepted.
            BdnError: from ``accept``.
        """
        left = list(wanted)
        outage = Outage(self.retries.policy)
        refused = wrong = None  # the range with a renewed location; the range being read once more
        while left:
            batch = await self._visit(left, on_cancel, arriving or Arriving())
            for item in left[: batch.arrived]:
                item.located.rounds.arrived(batch.sent)
                outage = Outage(self.retries.policy)
            del left[: batch.arrived]
            failure = batch.failure
            if isinstance(failure, LocationRefusedError):
                if left[0] is refused:
                    raise AuthRequiredError(failure.source, failure.reason) from None
                refused = left[0]
                await refused.located.location(refused=batch.location)
            elif isinstance(failure, ChecksumMismatchError) and on_wrong is not None:
                await on_wrong(left[0].located, batch.content, failure)
                if left[0] is wrong:
                    raise failure
                wrong = left[0]
            elif isinstance(failure, UpstreamError):
                await self.retries.wait_out(failure, outage, batch.sent, left[0].located.rounds)
            elif failure is not None:
                raise failure

    async def _visit(
        self,
        wanted: Sequence[FileRange],
        on_cancel: Callable[[], None] | None,
        arriving: Arriving,
    ) -> _Batch:
        locations = [await item.located.location() for item in wanted]
        stop = threading.Event()

        def cancel() -> None:
            stop.set()
            if on_cancel is not None:
                on_cancel()

        def goes_on(before: int, received: int) -> bool:
            arriving.received = before + received
            return not stop.is_set()

        def work(slot: BudgetSlot, buffer: memoryview) -> _Batch:
            batch = self._read_until_failure(wanted, locations, buffer, slot, goes_on)
            size = sum(item.range.size for item in wanted[: batch.arrived])
            if batch.failure is not None:  # otherwise it may be accounted for by now
                arriving.received = size
            return batch

        size = sum(item.range.size for item in wanted)
        async with self.retries.budgets.of(locations[0].url).slot() as slot:
            return await self.threads.run(size, partial(work, slot), on_cancel=cancel)

    def _read_until_failure(
        self,
        wanted: Sequence[FileRange],
        locations: Sequence[Location],
        buffer: memoryview,
        slot: BudgetSlot,
        goes_on: Callable[[int, int], bool],
    ) -> _Batch:
        offset = arrived = 0
        clock = self.retries.budgets.clock
        sent = clock()
        for item, location in zip(wanted, locations, strict=True):
            if not (goes_on(offset, 0) and slot.is_open):  # canceled, or the host requested a pause
                break
            content, sent = buffer[offset : offset + item.range.size], clock()
            try:
                checksum = self._request(item, location, content, slot, partial(goes_on, offset))
                item.accept(content, checksum)
            except ChecksumMismatchError as error:
                return _Batch(arrived, sent, error, location, bytes(content))
            except BdnError as error:
                return _Batch(arrived, sent, error, location)
            offset += len(content)
            arrived += 1
        return _Batch(arrived, sent)

    def _request(
        self,
        item: FileRange,
        location: Location,
        content: memoryview,
        slot: BudgetSlot,
        goes_on: Callable[[int], bool],
    ) -> Checksum | None:
        file = item.located.file
        request = RangeRequest(item.located.name, file.path, item.range, file.size)
        with slot.budget.request() as sent:
            stated = (self._in_order or self.ranges).read_into(location, request, content, goes_on)
            sent.size = len(content)
        return file.checksum or location.checksum or stated
