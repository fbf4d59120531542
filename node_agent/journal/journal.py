"""What this agent has decided, written down before anybody can see its effect, and told to the mirror later."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from bdn.core.events.caches import Left
from bdn.core.events.decision import Decision, Recorded
from bdn.disk.durable import make_folder, write_at_once
from bdn.wire.event_schema import EVENTS_AT_ONCE, NodeEvent
from node_agent.journal.pages import PAGE_SIZE, Pages

logger = logging.getLogger(__name__)
_WAITING: Final = 20_000  # events that wait for the mirror; older ones are in the journal alone
_TOLD_BYTES: Final = 256 * 1024  # in one heartbeat


class Journal:
    """A bounded journal in a folder of its own. All methods may be called from any thread, and block.

    ``record`` never raises: a disk that is full or read-only fails no stage for the journal's sake; what could not be written
    is told to the mirror all the same, and counted by ``on_lost``. What is recorded outlives a ``kill -9``. That something
    leaves the cache outlives a power cut, too: it costs one sync beside many deletions. Of the rest a power cut takes the
    last few seconds, as it does of the stages themselves.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float], on_lost: Callable[[int], None], *, page_size: int = PAGE_SIZE
    ) -> None:
        self._pages = Pages(folder, page_size)
        self._told_file = folder / "told"
        self._clock = clock
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._run = secrets.token_hex(8)  # a journal that was wiped must not repeat the names of events that are told
        self._number = 0
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=_WAITING)
        self._is_broken = False

    def open(self) -> None:
        """Find out where the last run ended, and what the mirror has not heard. An unreadable journal begins anew."""
        told = self._read_told()
        found: list[tuple[int, bytes]] = []
        try:
            make_folder(self._told_file.parent, 0o700)
            for line in self._pages.newest_first():
                event = _read(line)
                if event is None:
                    continue
                number = _number(event)
                if number <= told or len(found) == _WAITING:
                    break
                found.append((number, line))
        except OSError as error:
            logger.warning("the journal cannot be read: %s", error)
        self._waiting.extend(reversed(found))
        self._number = max(told, found[0][0] if found else 0)

    def record(self, decisions: Sequence[Decision]) -> None:
        """Write decisions down, in this order and next to each other. Not on the event loop: a busy disk may block."""
        if not decisions:
            return
        with self._lock:
            at, lines = self._clock(), []
            for decision in decisions:
                self._number += 1
                event = NodeEvent.of(f"{self._run}/{self._number:012}", at, decision)
                lines.append(event.model_dump_json().encode() + b"\n")
                self._waiting.append((self._number, lines[-1]))
            try:
                self._pages.append(b"".join(lines), is_synced=any(isinstance(one, Left) for one in decisions))
            except OSError as error:
                self._on_lost(len(lines))
                if not self._is_broken:
                    logger.warning("decisions are not written down: %s", error)
                self._is_broken = True
            else:
                self._is_broken = False

    # --- for the mirror ---

    @property
    def waiting(self) -> int:
        """How many events the mirror has not heard."""
        return len(self._waiting)

    def untold(self) -> list[NodeEvent]:
        """The oldest events that the mirror has not heard, as many as a heartbeat takes."""
        with self._lock:
            first = list(islice(self._waiting, EVENTS_AT_ONCE))
        found: list[NodeEvent] = []
        size = 0
        for _, line in first:
            size += len(line)
            if found and size > _TOLD_BYTES:
                break
            found.append(NodeEvent.model_validate_json(line))
        return found

    def told(self, events: Sequence[NodeEvent]) -> None:
        """The mirror has these. Forgetting that, in a crash, costs telling them again."""
        if not events:
            return
        last = _number(events[-1])
        with self._lock:
            while self._waiting and self._waiting[0][0] <= last:
                self._waiting.popleft()
            try:
                write_at_once(self._told_file, str(last).encode())
            except OSError as error:
                logger.warning("what the mirror has heard is not noted: %s", error)

    # --- for people ---

    def events(self, mention: str = "") -> Iterator[Recorded]:
        """What was recorded, newest first; with ``mention``, only events in which these words stand."""
        needle = mention.encode()
        for line in self._pages.newest_first():
            if needle in line and (event := _read(line)) is not None:
                yield event.recorded()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._pages.close()

    def _read_told(self) -> int:
        try:
            return int(self._told_file.read_bytes())
        except (OSError, ValueError):
            return 0


def _read(line: bytes) -> NodeEvent | None:
    """The event, or None for a line that is not whole."""
    try:
        event = NodeEvent.model_validate_json(line)
        _number(event)
    except (ValidationError, ValueError):
        return None
    return event


def _number(event: NodeEvent) -> int:
    return int(event.id.rpartition("/")[2])
