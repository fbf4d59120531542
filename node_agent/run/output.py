"""Sends a rank's output to the mirror: each line once and in order, also across kills of the agent and outages.

A batch is recorded before it is sent. After a kill the same bytes are sent under the same number, and the mirror
stores a number once. What the mirror has is freed on disk by punching holes; what it does not take is bounded.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Final

from pydantic import BaseModel, ValidationError

from bdn.core.errors import BdnError, LimitExceededError, NotFoundError
from bdn.core.pace.retry import RetryPolicy
from bdn.disk.durable import disk_errors, write_at_once
from bdn.disk.syscalls import punch_hole
from bdn.disk.threads import in_thread
from bdn.net.client import OutageRetry
from bdn.wire.run_schema import LINE_BYTES, LINES_AT_ONCE, LOG_BYTES, LONGEST_LINE, RunOutput
from node_agent.run.directory import RunDirectory, opened_plain

logger = logging.getLogger(__name__)
_BATCH_BYTES: Final = 512 * 1024  # JSON takes up to six times as much, and the mirror accepts 4 MiB
_PIECE: Final = 1024**2
_FREED_BYTES: Final = 64 * 1024**2  # of dropped lines, at once: a fast job writes on while they are counted
_COUNTED_BYTES: Final = 2 * 1024**3  # dropped at once with its lines counted: a sparse file has terabytes to read
_AGAIN_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.3  # between two reads of a file without new output
_PATIENT: Final = OutageRetry(policy=RetryPolicy(inf, first_seconds=0.5, longest_seconds=2.0))


def cut(content: bytes, *, is_end: bool) -> tuple[list[bytes], int]:
    """The lines of ``content`` for one batch, and how many of its bytes they take.

    A line over 64 KiB is split between two characters. A remainder without a newline is left, unless the output ends.
    """
    lines, at = list[bytes](), 0
    while at < len(content) and len(lines) < LINES_AT_ONCE - 1:  # and a note
        newline = content.find(b"\n", at, at + LONGEST_LINE + 1)
        if newline >= 0:
            stop, after = newline, newline + 1
        elif len(content) - at > LONGEST_LINE:
            stop = at + LONGEST_LINE
            while stop > at + LONGEST_LINE - 4 and content[stop] & 0xC0 == 0x80:  # in the middle of a character
                stop -= 1
            after = stop
        elif is_end:
            stop = after = len(content)
        else:
            break
        lines.append(content[at:stop])
        at = after
    return lines, at


def text_of(line: bytes) -> str:
    """As a terminal shows it: of text between carriage returns the last part."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").replace("\0", "\ufffd")


class _Mark(BaseModel):
    """The batch ``seq`` has the bytes from ``start`` to ``stop``, none if they are equal, after a note on ``noted`` lines.

    The next one begins at ``next``; ``dropped`` lines before it were dropped. ``time`` is the newest of a line.
    """

    seq: int = 0
    start: int = 0
    stop: int = 0
    noted: int = 0
    next: int = 0
    dropped: int = 0
    time: int = 0


def _start_of_newest(descriptor: int, start: int, stop: int, log_bytes: int) -> int:
    """Where the newest output begins whose lines fit into a log, to a piece; at least ``start``."""
    at = stop
    while at > start:
        begin = max(start, at - _PIECE)
        piece = os.pread(descriptor, at - begin, begin)
        log_bytes -= len(piece) + LINE_BYTES * piece.count(b"\n")
        if log_bytes < 0:
            break
        at = begin
    return at


def _whole_lines(descriptor: int, start: int, stop: int) -> tuple[int, int]:
    """The end of the line at ``stop`` or, if it is longer than a piece, a place in it; and the count of lines from ``start``."""
    at, count = start, 0
    while at < stop and (piece := os.pread(descriptor, _PIECE, at)):
        at += piece.rfind(b"\n") + 1 or len(piece)
        count += piece.count(b"\n")
    return at, count


@dataclass
class OutputSender:
    """``send`` is a call to the mirror. Use one at a time for a directory.

    Of output beyond ``most_bytes`` that the mirror has not taken, only the newest lines are kept that fit into a log of
    ``log_bytes``: the mirror would drop the others. ``most_bytes`` is far below 1 GiB, because a fast job writes on meanwhile.
    """

    directory: RunDirectory
    send: Callable[[RunOutput], Awaitable[object]]
    most_bytes: int = 512 * 1024**2
    log_bytes: int = LOG_BYTES
    is_refused: bool = False  # the mirror does not know the run any more
    _mark: _Mark = field(default_factory=_Mark)
    _most: int = _BATCH_BYTES
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the mark

    def load(self) -> None:
        with suppress(OSError, ValidationError):
            self._mark = _Mark.model_validate_json(self.directory.sent.read_bytes())

    async def send_next(self, *, is_end: bool) -> bool:
        """Send a batch, if there is one, and wait until the mirror has stored it. Returns False if there is none.

        With ``is_end`` the output has ended. Raises ``DiskFailedError``.
        """
        async with self._lock:
            output = None if self.is_refused else await in_thread(self._batch, is_end=is_end)
        if output is None:
            return False
        try:
            await _PATIENT.ask(lambda: self.send(output))
        except BdnError as error:
            await self._fail(error)
        else:
            async with self._lock:
                await in_thread(self._acknowledged, output)
        return True

    async def send_all(self, has_ended: Callable[[], bool]) -> None:
        """Send the output as it is written, until it has ended and the mirror has all of it, or refuses the run."""
        complaint = ""
        while True:
            is_end = has_ended()
            try:
                if await self.send_next(is_end=is_end):
                    continue
            except BdnError as error:  # the job may do with its file what it likes
                if str(error) != complaint:
                    logger.warning("cannot read the output of %s: %s", self.directory.path.name, error)
                complaint = str(error)
            if is_end:
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def bound(self, *, is_end: bool = False) -> None:
        """Drop the oldest lines beyond what may wait for the mirror. Raises ``DiskFailedError``.

        With ``is_end`` the output has ended. Then no line is kept that the log has no room for: the end of the rank waits
        until all are sent.
        """
        async with self._lock:
            await in_thread(self._drop, 0 if is_end else self.most_bytes)

    async def _fail(self, error: BdnError) -> None:
        self.is_refused = error.code == NotFoundError.code
        logger.warning("the mirror does not take output of %s: %s", self.directory.path.name, error)
        if error.code == LimitExceededError.code and self._most > 2 * LONGEST_LINE:
            async with self._lock:
                self._most //= 2  # it was refused, so the number may have other lines
                self._mark.next = self._mark.stop = self._mark.start
        elif not self.is_refused:
            await asyncio.sleep(_AGAIN_SECONDS)

    def _batch(self, *, is_end: bool) -> RunOutput | None:
        mark = self._mark
        with disk_errors(self.directory.output), opened_plain(self.directory.output) as file:
            if mark.start == mark.stop and not mark.noted:
                size = os.fstat(file.fileno()).st_size
                content = os.pread(file.fileno(), self._most, mark.next)
                _, taken = cut(content, is_end=is_end and mark.next + len(content) >= size)
                if not taken and not mark.dropped:
                    return None
                mark.start, mark.noted, mark.dropped = mark.next, mark.dropped, 0
                mark.next = mark.stop = mark.start + taken
                self._save()
            lines, _ = cut(os.pread(file.fileno(), mark.stop - mark.start, mark.start), is_end=True)
        now = max(time.time_ns(), mark.time + 1)
        texts = list(map(text_of, lines))
        if mark.noted:
            note = f"bdn: at least {mark.noted} lines dropped here, because the mirror did not take them in time"
            texts.insert(0, note)
        return RunOutput(seq=mark.seq, lines=[(now + index, text) for index, text in enumerate(texts)])

    def _acknowledged(self, output: RunOutput) -> None:
        mark = self._mark
        self._mark = _Mark(
            seq=mark.seq + 1,
            start=mark.next,
            stop=mark.next,
            next=mark.next,
            dropped=mark.dropped,
            time=output.lines[-1][0] if output.lines else mark.time,
        )
        self._save()
        self._free(0, mark.next)  # from the beginning, since blocks are freed only whole

    def _drop(self, most_bytes: int) -> None:
        mark = self._mark
        with disk_errors(self.directory.output), opened_plain(self.directory.output) as file:
            size = os.fstat(file.fileno()).st_size
            if size - mark.next <= most_bytes:
                return
            begun, stop = mark.next, _start_of_newest(file.fileno(), mark.next, size, self.log_bytes)
            if stop - begun > _COUNTED_BYTES:
                mark.next = stop - 1  # the piece read there ends with a line
            while mark.next < stop:
                end, count = _whole_lines(file.fileno(), mark.next, min(stop, mark.next + _FREED_BYTES))
                if end == mark.next:
                    break  # truncated by the job
                mark.next, mark.dropped = end, mark.dropped + max(1, count)
                self._save()
                self._free(begun, end)
                begun = end

    def _save(self) -> None:
        with disk_errors(self.directory.sent):
            write_at_once(self.directory.sent, self._mark.model_dump_json().encode())

    def _free(self, start: int, stop: int) -> None:
        with suppress(OSError), opened_plain(self.directory.output, "r+b") as file:
            punch_hole(file.fileno(), start, stop - start)
