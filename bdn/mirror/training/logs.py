"""Logs of training jobs: lines are stored once, dated within bounds, and read in pages that clients can continue."""

import heapq
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from bdn.core.units import format_size
from bdn.mirror.db import training
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import TrainingJobRow, TrainingLogRow
from bdn.mirror.db.training import Line
from bdn.mirror.training.steps import ns_of
from bdn.wire.run_schema import LOG_BYTES
from bdn.wire.training_schema import LogLine, LogQuery

WINDOW_BYTES: Final = 4 * 1000**2  # of an answer without a limit
LATE_NS: Final = 45 * 10**9  # a client that follows asks for the last minute every two seconds
_MILLI: Final = 10**6  # nanoseconds
_END_OF_TIME: Final = 2**63 - 1
_LEFT: Final = 10  # a tenth of the limit is freed at once
_DROPPED: Final = "{{count}} earlier lines were dropped: the log of a job holds at most {limit}"


@dataclass(frozen=True)
class Logs:
    database: Database
    _unchecked: Counter[str] = field(default_factory=Counter)  # bytes stored here since a job's log was measured

    def forget_others(self, active: Collection[str]) -> None:
        """Forget how much the logs of all jobs but these have grown."""
        for job in self._unchecked.keys() - active:
            del self._unchecked[job]

    async def append(self, row: TrainingJobRow, rank: int, seq: int, lines: Sequence[Line]) -> None:
        """Store a batch. Of a repeated one only lines beyond the stored ones are new.

        A line's time is moved into the 45 s before now, so that clients that follow the log see lines of a slow clock
        or a short outage; within a rank times increase.
        """
        now = ns_of(self.database.now())
        async with self.database.write() as session:
            newest = await training.newest_batch(session, row.id, rank)
            if newest is not None and seq <= newest.seq:
                lines = lines[newest.lines :] if seq == newest.seq else ()
            dated = _dated(lines, max(now - LATE_NS, ns_of(row.created_at)), now, newest.last_ns if newest else 0)
            if not dated:
                return
            if newest is not None and seq == newest.seq:
                await training.extend_batch(session, row.id, rank, newest, dated)
            else:
                await training.add_batch(session, row.id, rank, seq, dated)
        await self._bound(row, sum(len(text) for _, text in dated))

    async def _bound(self, row: TrainingJobRow, added: int) -> None:
        """Drop the oldest batches of a log that is too long. Measures it once for each 25th of the limit."""
        self._unchecked[row.id] += added
        if self._unchecked[row.id] < LOG_BYTES // 25:
            return
        del self._unchecked[row.id]
        async with self.database.read() as session:
            size = await training.log_size(session, row.id)
        if size <= LOG_BYTES:
            return
        async with self.database.write() as session:
            if await training.lock(session, row.id) is None:
                return
            size = await training.log_size(session, row.id)
            dropped = await training.drop_oldest(session, row.id, size - LOG_BYTES + LOG_BYTES // _LEFT)
            said = _DROPPED.format(limit=format_size(LOG_BYTES))
            await training.note_dropped(session, row.id, ns_of(row.created_at), dropped, said)

    async def read(self, job: str, query: LogQuery) -> list[LogLine]:
        """A page of a job's log. It never ends inside a millisecond, at which the client continues."""
        first = (query.start_epoch_millis or 0) * _MILLI
        last = _END_OF_TIME
        if query.end_epoch_millis is not None:
            last = min(last, (query.end_epoch_millis + 1) * _MILLI - 1)
        is_ascending = query.direction == "asc"
        from_oldest = is_ascending and query.limit is not None
        page: list[tuple[int, int, str]] = []
        size = 0
        async with self.database.read() as session:
            found = training.window(session, job, first, last, is_ascending=from_oldest)
            async with (
                aclosing(found) as batches,
                aclosing(_merged(batches, first, last, is_ascending=from_oldest)) as lines,
            ):
                async for line in lines:
                    is_full = len(page) >= query.limit if query.limit is not None else size >= WINDOW_BYTES
                    if is_full and line[0] // _MILLI != page[-1][0] // _MILLI:
                        break
                    page.append(line)
                    size += len(line[2])
        if is_ascending and not from_oldest:
            page.reverse()
        return [
            LogLine(timestamp=str(at), message=text, replica=f"r{rank}" if rank >= 0 else None)
            for at, rank, text in page
        ]


def _dated(lines: Sequence[Line], earliest: int, latest: int, before: int) -> list[Line]:
    dated: list[Line] = []
    for at, text in lines:
        before = max(min(max(at, earliest), latest), before + 1)
        dated.append((before, text))
    return dated


async def _merged(
    batches: AsyncGenerator[TrainingLogRow], first: int, last: int, *, is_ascending: bool
) -> AsyncGenerator[tuple[int, int, str]]:
    """The lines of all batches by time, each with its rank. Holds the batches that overlap in time, and no others."""
    sign = 1 if is_ascending else -1
    waiting: list[tuple[int, int, int, str]] = []  # time, rank and number, each times ``sign``, and text
    count = 0
    async for batch in batches:
        bound = sign * (batch.first_ns if is_ascending else batch.last_ns)
        while waiting and waiting[0][0] < bound:
            yield _line(heapq.heappop(waiting))
        for at, text in training.unpack(batch.packed):
            count += 1
            if first <= at <= last:
                heapq.heappush(waiting, (sign * at, sign * batch.rank, sign * count, text))
    while waiting:
        yield _line(heapq.heappop(waiting))


def _line(waiting: tuple[int, int, int, str]) -> tuple[int, int, str]:
    at, rank, _, text = waiting
    return (at, rank, text) if at >= 0 else (-at, -rank, text)
