"""The record of chunks and checkpoints sent from a job volume, so that a restarted syncer sends nothing twice.

A line is ``<checksum> <JSON>``. Lines with a wrong checksum or impossible values are skipped. A skipped line costs
at worst one more upload; a wrong digest would make a wrong checkpoint. A file is identified by its path and stamp, so
entries about a file that has changed since do not match.
"""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from bdn.core.chunk import Digest, chunk_count, digest_of
from bdn.core.training.settling import Stamp
from bdn.disk.durable import disk_errors, sync_folder, write_durably

_CHECKSUM: Final = 16  # hexadecimal digits
_LEAST_STALE: Final = 1000  # lines; below this the file is not rewritten


class Committed(NamedTuple):
    """The version, one mark per file, and the time by the mirror's clock."""

    version: str
    marks: frozenset[str]
    at: float = 0.0


class VolumeJournal:
    """The journal of one volume, a context manager. Blocking; shared by threads.

    A recorded entry survives ``kill -9`` once the call has returned. A power cut may lose entries after the last
    ``note_settled``. After ``DiskFailedError`` the entry may or may not be recorded; the next call retries, and no
    earlier entry is lost.
    """

    def __init__(self, file: Path, *, least_stale: int = _LEAST_STALE) -> None:
        self._file = file
        self._least_stale = least_stale
        self._lock = threading.Lock()
        self._sent: dict[str, tuple[Stamp, dict[int, Digest]]] = {}
        self._committed: dict[str, Committed] = {}
        self._settled: dict[str, str] = {}
        self._descriptor = -1
        self._lines = 0
        self._is_torn = False

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Load the file, or create it. Raises ``DiskFailedError``."""
        with self._lock, disk_errors(self._file):
            with suppress(FileNotFoundError):
                content = self._file.read_bytes()
                self._is_torn = not content.endswith(b"\n") and bool(content)
                for line in content.splitlines():  # JSON in ASCII contains no other line ends
                    self._lines += 1
                    self._take(_believed(line))
            self._open()

    def close(self) -> None:
        with self._lock:
            self._close()

    def chunks(self, path: str, stamp: Stamp) -> Mapping[int, Digest]:
        """Digests of the chunks sent, by index; empty if the file has changed since."""
        with self._lock:
            known = self._sent.get(path)
            return dict(known[1]) if known is not None and known[0] == stamp else {}

    def committed(self, name: str) -> Committed | None:
        with self._lock:
            return self._committed.get(name)

    def settled(self, name: str) -> str | None:
        with self._lock:
            return self._settled.get(name)

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._committed)

    def note_chunk(self, path: str, stamp: Stamp, index: int, digest: Digest) -> None:
        """Record that the mirror has chunk ``index`` of the file with this stamp."""
        self._note(["chunk", path, list(stamp), index, digest.hex])

    def note_commit(self, name: str, committed: Committed) -> None:
        """Record a commit; the new version replaces the earlier one."""
        self._note(_said_of(name, committed))

    def note_lost(self, name: str) -> None:
        """Record that the mirror has lost a committed checkpoint."""
        self._note(["lost", name])

    def note_settled(self, name: str, state: str) -> None:
        """Record the state of a checkpoint that no process was writing. Survives a power cut."""
        self._note(["settled", name, state])
        with self._lock, disk_errors(self._file):
            if self._descriptor >= 0:  # otherwise the file was just rewritten durably
                os.fsync(self._descriptor)
            sync_folder(self._file.parent)

    def retain(self, files: Mapping[str, Stamp]) -> None:
        """Drop the chunks of files that are gone or have changed."""
        with self._lock:
            self._sent = {path: known for path, known in self._sent.items() if files.get(path) == known[0]}
            self._renew_if_stale()

    def _note(self, said: list[object]) -> None:
        with self._lock, disk_errors(self._file):
            self._append(_line(said))
            self._take(said)
            self._renew_if_stale()

    def _take(self, said: list[object] | None) -> None:
        match said:
            case ["chunk", str(path), [int(), int(), int(), int(), int()] as numbers, int(index), str(digest)]:
                stamp = Stamp(*numbers)
                known = self._sent.get(path)
                if known is None or known[0] != stamp:
                    known = self._sent[path] = stamp, {}
                if 0 <= index < chunk_count(stamp.size):
                    with suppress(ValueError):
                        known[1][index] = Digest(digest)
            case ["commit", str(name), str(version), list(marks), float(at)]:
                found = frozenset(mark for mark in marks if isinstance(mark, str))
                self._committed[name] = Committed(version, found, at)
            case ["lost", str(name)]:
                self._committed.pop(name, None)
            case ["settled", str(name), str(state)]:
                self._settled[name] = state
            case _:
                pass

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        content = b"\n" + line if self._is_torn else line  # a torn line must not damage the next one
        self._is_torn = True  # until the write is complete
        while content:
            content = content[os.write(self._descriptor, content) :]
        self._is_torn = False
        self._lines += 1

    def _renew_if_stale(self) -> None:
        live = len(self._committed) + len(self._settled) + sum(len(digests) for _, digests in self._sent.values())
        if self._lines - live < max(self._least_stale, live):
            return
        with disk_errors(self._file):
            write_durably(self._file, self._live())
            self._close()  # the descriptor points to the replaced file
            self._lines, self._is_torn = live, False

    def _live(self) -> Iterator[bytes]:
        for name, committed in self._committed.items():
            yield _line(_said_of(name, committed))
        for name, state in self._settled.items():
            yield _line(["settled", name, state])
        for path, (stamp, digests) in self._sent.items():
            for index, digest in digests.items():
                yield _line(["chunk", path, list(stamp), index, digest.hex])

    def _open(self) -> None:
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _said_of(name: str, committed: Committed) -> list[object]:
    return ["commit", name, committed.version, sorted(committed.marks), committed.at]


def _line(said: list[object]) -> bytes:
    content = json.dumps(said, separators=(",", ":")).encode()
    return b"%b %b\n" % (_checksum(content), content)


def _believed(line: bytes) -> list[object] | None:
    checksum, _, content = line.partition(b" ")
    if checksum != _checksum(content):
        return None
    found = json.loads(content)
    return found if isinstance(found, list) else None


def _checksum(content: bytes) -> bytes:
    return digest_of(content).hex[:_CHECKSUM].encode()
