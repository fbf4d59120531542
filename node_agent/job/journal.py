"""What of a job volume was sent, in a file of lines: a syncer that starts again sends nothing twice.

A line is ``<checksum> <JSON>``. It is believed if its checksum is right and what it says is possible, and left out otherwise: what is left out is
sent again at worst, and a digest that is wrong would be a wrong checkpoint. A file of a volume is known by its path and its stamp, so
that what is noted of a file that has changed since says nothing.
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
_LEAST_STALE: Final = 1000  # lines; fewer are not worth a new file


class Committed(NamedTuple):
    """A checkpoint as it was committed: as which version, of each of its files, as it was, the mark, and when by the mirror's clock."""

    version: str
    marks: frozenset[str]
    at: float = 0.0


class VolumeJournal:
    """The journal of one volume. Blocking; shared by threads; a context manager, which opens and closes it.

    What is noted survives a ``kill -9`` once the call has returned. A power cut may take what was noted after the last
    ``note_settled``. Of a call that
    raises ``DiskFailedError`` it is not known whether it noted anything; the next one tries again, and nothing that was noted is lost.
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
        with self._lock, disk_errors(self._file):
            with suppress(FileNotFoundError):
                content = self._file.read_bytes()
                self._is_torn = not content.endswith(b"\n") and bool(content)
                for line in content.splitlines():  # of JSON in ASCII: no other line end stands in it
                    self._lines += 1
                    self._take(_believed(line))
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._close()

    def chunks(self, path: str, stamp: Stamp) -> Mapping[int, Digest]:
        """The chunks of a file that were sent, by index; none of a file that is another one by now."""
        with self._lock:
            known = self._sent.get(path)
            return dict(known[1]) if known is not None and known[0] == stamp else {}

    def committed(self, name: str) -> Committed | None:
        """How a checkpoint was committed last."""
        with self._lock:
            return self._committed.get(name)

    def settled(self, name: str) -> str | None:
        """The state in which a checkpoint was when it had settled last."""
        with self._lock:
            return self._settled.get(name)

    @property
    def names(self) -> list[str]:
        """The checkpoints that were committed."""
        with self._lock:
            return list(self._committed)

    def note_chunk(self, path: str, stamp: Stamp, index: int, digest: Digest) -> None:
        """The mirror has chunk ``index`` of a file as it was at this look."""
        self._note(["chunk", path, list(stamp), index, digest.hex])

    def note_commit(self, name: str, committed: Committed) -> None:
        """A checkpoint is there, in this version, which replaces the one before."""
        self._note(_said_of(name, committed))

    def note_lost(self, name: str) -> None:
        """The mirror has no version of a checkpoint that was committed."""
        self._note(["lost", name])

    def note_settled(self, name: str, state: str) -> None:
        """A checkpoint was seen in this state while nobody wrote it. No power cut takes that back."""
        self._note(["settled", name, state])
        with self._lock, disk_errors(self._file):
            if self._descriptor >= 0:  # else it was written anew, durably
                os.fsync(self._descriptor)
            sync_folder(self._file.parent)

    def retain(self, files: Mapping[str, Stamp]) -> None:
        """Forget the chunks of all files but these, as they are: others are gone or have changed."""
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
        content = b"\n" + line if self._is_torn else line  # so that what a kill left half takes no other with it
        self._is_torn = True  # until all of it is there
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
            self._close()  # it leads to the file that was replaced
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
