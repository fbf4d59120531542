"""The journal: this agent's events, written before their effects are visible and reported to the mirror later."""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from bdn.core.events import EVICTED, Event
from bdn.disk.durable import make_folder, write_at_once
from bdn.wire.event_schema import EVENTS_AT_ONCE, NodeEvent

logger = logging.getLogger(__name__)
_WAITING: Final = 20_000  # unreported events in memory; older ones stay in the journal but are not reported
_REPORTED_BYTES: Final = 256 * 1024  # in one heartbeat
_PAGE_SIZE: Final = 8 * 1024 * 1024  # two pages contain at least 40,000 lines
_PRIVATE: Final = 0o700


class Journal:
    """A bounded journal in its own folder. All methods block and may be called from any thread.

    ``record`` never raises, so that a full or read-only disk fails no stage because of the journal. Events that
    could not be written are still reported to the mirror, and counted by ``on_lost``. Recorded events survive ``kill
    -9``. Evictions also survive a power cut, at one sync per batch of deletions. Of other events a power cut loses the
    last few seconds, as it does of the stages themselves.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float], on_lost: Callable[[int], None], *, page_size: int = _PAGE_SIZE
    ) -> None:
        self._pages = _Pages(folder, page_size)
        self._reported_file = folder / "told"
        self._clock = clock
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._run = secrets.token_hex(8)  # a wiped journal must not reuse ids of reported events
        self._number = 0
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=_WAITING)
        self._is_broken = False

    def open(self) -> None:
        """Find the last number and the unreported events. An unreadable journal begins anew."""
        reported = self._read_reported()
        found: list[tuple[int, bytes]] = []
        try:
            make_folder(self._reported_file.parent, _PRIVATE)
            for line in self._pages.newest_first():
                event = _read(line)
                if event is None:
                    continue
                number = _number(event)
                if number <= reported or len(found) == _WAITING:
                    break
                found.append((number, line))
        except OSError as error:
            logger.warning("cannot read the journal of events: %s; it begins anew", error)
        self._waiting.extend(reversed(found))
        self._number = max(reported, found[0][0] if found else 0)

    def record(self, decided: Sequence[Event]) -> None:
        """Append events contiguously, in order. Not on the event loop: a busy disk may block."""
        if not decided:
            return
        with self._lock:
            at, lines = self._clock(), []
            for event in decided:
                self._number += 1
                line = NodeEvent.of(replace(event, id=f"{self._run}/{self._number:012}", at=at))
                lines.append(line.model_dump_json().encode() + b"\n")
                self._waiting.append((self._number, lines[-1]))
            try:
                self._pages.append(b"".join(lines), is_synced=any(event.kind in EVICTED for event in decided))
            except OSError as error:
                self._on_lost(len(lines))
                if not self._is_broken:
                    logger.warning("cannot write events to the journal: %s; the mirror still gets them", error)
                self._is_broken = True
            else:
                self._is_broken = False

    # --- for the mirror ---

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unreported(self) -> list[NodeEvent]:
        """The oldest unreported events, as many as one heartbeat may carry."""
        with self._lock:
            first = list(islice(self._waiting, EVENTS_AT_ONCE))
        found: list[NodeEvent] = []
        size = 0
        for _, line in first:
            size += len(line)
            if found and size > _REPORTED_BYTES:
                break
            found.append(NodeEvent.model_validate_json(line))
        return found

    def mark_reported(self, events: Sequence[NodeEvent]) -> None:
        """Record that the mirror has these events. A crash that loses the record merely reports them again."""
        if not events:
            return
        last = _number(events[-1])
        with self._lock:
            while self._waiting and self._waiting[0][0] <= last:
                self._waiting.popleft()
            try:
                write_at_once(self._reported_file, str(last).encode())
            except OSError as error:
                logger.warning(
                    "cannot store which events were reported: %s; they may be reported again after a restart", error
                )

    # --- for readers ---

    def events(self, mention: str = "") -> Iterator[Event]:
        """Newest first; ``mention`` selects events whose lines contain the text."""
        needle = mention.encode()
        for line in self._pages.newest_first():
            if needle in line and (event := _read(line)) is not None:
                yield event.event()

    def close(self) -> None:
        with self._lock:
            self._pages.close()

    def _read_reported(self) -> int:
        try:
            return int(self._reported_file.read_bytes())
        except (OSError, ValueError):
            return 0


def _read(line: bytes) -> NodeEvent | None:
    """None for a torn line."""
    try:
        event = NodeEvent.model_validate_json(line)
        _number(event)
    except (ValidationError, ValueError):
        return None
    return event


def _number(event: NodeEvent) -> int:
    return int(event.id.rpartition("/")[2])


class _Pages:
    """An append-only file of lines and its predecessor; older lines are deleted.

    Blocking; one caller at a time. Methods raise ``OSError``, after which the next call retries. A line torn by a
    kill, a full disk or a power cut is terminated and skipped by readers, so that it does not damage its neighbours.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._current = folder / "journal.jsonl"
        self._earlier = folder / "journal.1.jsonl"
        self._size = size
        self._descriptor: int | None = None
        self._written = 0
        self._is_torn = False

    def append(self, lines: bytes, *, is_synced: bool) -> None:
        """Append whole lines. They survive a kill and, if ``is_synced``, a power cut."""
        descriptor = self._open()
        try:
            content = b"\n" + lines if self._is_torn else lines
            self._is_torn = True  # until the write is complete
            while content:
                count = os.write(descriptor, content)
                self._written += count
                content = content[count:]
            self._is_torn = False
            if is_synced:
                os.fdatasync(descriptor)
            if self._written >= self._size:
                self.close()
                self._current.replace(self._earlier)
        except OSError:
            self.close()
            raise

    def newest_first(self) -> Iterator[bytes]:
        for page in (self._current, self._earlier):
            try:
                content = page.read_bytes()
            except FileNotFoundError:
                continue
            yield from (line for line in reversed(content.split(b"\n")) if line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            make_folder(self._current.parent, _PRIVATE)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._current, flags, 0o600)
            self._written = os.fstat(self._descriptor).st_size
            last = os.pread(self._descriptor, 1, self._written - 1) if self._written else b"\n"
            self._is_torn = last != b"\n"
        return self._descriptor
