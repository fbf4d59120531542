"""Quarantine: wrong bytes as they were found, as evidence for operators. Never served."""

import itertools
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.disk.durable import disk_errors, remove_tree, write_at_once

logger = logging.getLogger(__name__)
KEPT: Final = 64  # items: on a failing disk the last ones show as much as all of them


@dataclass(frozen=True)
class Evidence:
    """What was wrong. ``when`` is in seconds since the epoch; ``found`` is None if the bytes were unreadable."""

    when: float
    tier: str
    file: str
    chunk: int | None  # its index; None: bytes beyond the end of the file
    expected: str
    found: str | None
    reason: str


@dataclass(frozen=True)
class Quarantine:
    """The folder ``quarantine`` with a bounded number of items; the oldest are removed. Blocking."""

    folder: Path
    kept: int = KEPT

    def keep(self, evidence: Evidence, content: memoryview) -> None:
        """Write the wrong bytes, at most one chunk, and a JSON document that describes them.

        If the disk fails, the evidence is only logged: a full disk must not prevent a repair.
        """
        index = "end" if evidence.chunk is None else str(evidence.chunk)
        name = f"{evidence.expected.removeprefix('b3:')}.{index}.{int(evidence.when * 1000)}"
        try:
            with disk_errors(self.folder):
                if content:
                    write_at_once(self.folder / f"{name}.bytes", bytes(content))
                write_at_once(self.folder / f"{name}.json", json.dumps(asdict(evidence), indent=1).encode())
                self._prune()
        except BdnError as error:
            logger.warning("cannot store evidence %s in quarantine: %s; the repair continues", evidence, error)

    def take(self, path: Path) -> Path:
        """Move a whole file here; returns its new path. Open descriptors and hard links stay valid."""
        taken = (self.folder / f"{path.name}.{number}" for number in itertools.count())
        with disk_errors(path):
            place = next(place for place in taken if not place.exists())
            path.rename(place)
            self._prune()
        return place

    def _prune(self) -> None:
        """Counts bytes and the document beside them as one item."""
        items: defaultdict[str, list[Path]] = defaultdict(list)
        for path in self.folder.iterdir():
            items[path.name.removesuffix(".json").removesuffix(".bytes")].append(path)
        if len(items) <= self.kept:
            return
        by_age = sorted(items.values(), key=lambda paths: max(path.lstat().st_ctime_ns for path in paths))
        for paths in by_age[: len(items) - self.kept]:
            for path in paths:
                remove_tree(path)


class SuspectFiles:
    """Suspected contents of the node tier, oldest suspicion first. Thread-safe.

    ``on_news`` is called in the suspecting thread, for a file that was not suspected before.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._contents: dict[Digest, None] = {}

    def add(self, content: Digest) -> None:
        with self._lock:
            is_new = content not in self._contents
            self._contents[content] = None
        if is_new:
            self.on_news()

    def clear(self, content: Digest) -> None:
        with self._lock:
            self._contents.pop(content, None)

    def restore(self, contents: Iterable[Digest]) -> None:
        with self._lock:
            self._contents |= dict.fromkeys(contents)

    def all(self) -> tuple[Digest, ...]:
        with self._lock:
            return tuple(self._contents)
