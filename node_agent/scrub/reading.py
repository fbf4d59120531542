"""Verifies files by reading them from the disk, past the page cache: each chunk is compared with its digest."""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bdn.core.chunk import (
    CHUNK_SIZE,
    ByteRange,
    Digest,
    FileLayout,
    PlacedChunk,
    chunk_count,
    chunk_range,
    digest_of,
    file_digest,
)
from bdn.disk.direct import UncachedFile
from bdn.disk.threads import in_thread
from bdn.transfer.byte_threads import BufferPool
from bdn.wire.operation_schema import DamagedItem, Tier
from node_agent.cache.quarantine import Evidence, Quarantine
from node_agent.metrics import AgentMetrics


@dataclass(frozen=True)
class ScrubTarget:
    """A content and its file. ``shown`` is the path for people, if it differs from the manifest's."""

    path: Path
    content: Digest
    manifest: Digest
    tier: Tier = "node"
    shown: str | None = None


@dataclass(frozen=True)
class FileDamage:
    """A chunk that does not match its digest or, without ``chunk``, a defect of the whole file.

    ``found`` is None if the chunk is unreadable. ``is_of_the_disk``: the disk also failed to store the right bytes.
    """

    reason: str
    chunk: PlacedChunk | None = None
    found: Digest | None = None
    is_of_the_disk: bool = False


def single_chunk(content: Digest, size: int) -> FileLayout:
    """A file of at most one chunk has the chunk's digest."""
    return FileLayout(content, size, (content,) if size else ())


Pace = Callable[[int], Awaitable[object]]


async def unpaced(_: int) -> None:
    """For requests: a client waits for the answer."""


@dataclass
class Findings:
    """Counters and damages of one verification. ``pace`` is awaited before each read, with its bytes.

    With ``is_repairing`` damage is repaired or quarantined; otherwise it is only reported.
    """

    is_repairing: bool = True
    pace: Pace = unpaced
    items: list[DamagedItem] = field(default_factory=list)
    chunks_read: int = 0
    bytes_read: int = 0


@dataclass(frozen=True)
class ScrubReader:
    """Reads files and stores evidence; changes no content. Uses one of the ``buffers`` while it reads a chunk.

    Methods raise ``FileNotFoundError`` if the file is gone. An unreadable chunk is damage, not an error.
    """

    buffers: BufferPool
    quarantine: Quarantine
    metrics: AgentMetrics
    clock: Callable[[], float]

    async def read(self, path: Path, layout: FileLayout, tier: Tier, findings: Findings) -> list[FileDamage]:
        found: list[FileDamage | None] = [await in_thread(_look_at_end, path, layout)]
        for chunk in layout.placed():
            await findings.pace(chunk.range.size)
            found.append(await in_thread(self._look, path, chunk))
            self._count(tier, chunk.range.size, findings)
        return [one for one in found if one is not None]

    async def is_right(self, path: Path, content: Digest, size: int, findings: Findings) -> bool:
        """For files without a known layout: whether the whole file matches its digest."""
        digests = []
        for index in range(chunk_count(size)):
            place = chunk_range(size, index)
            await findings.pace(place.size)
            digests.append(await in_thread(self._digest, path, place))
            self._count("node", place.size, findings)
        known = [one for one in digests if one is not None]
        return len(known) == len(digests) and file_digest(size, known) == content

    async def confirm(self, target: ScrubTarget, layout: FileLayout, damages: Sequence[FileDamage]) -> list[FileDamage]:
        """Read again; returns the damages that persist, and stores their bytes as evidence."""
        again = [await in_thread(self._confirm, target, layout, one) for one in damages]
        return [one for one in again if one is not None]

    def _count(self, tier: Tier, size: int, findings: Findings) -> None:
        findings.chunks_read += 1
        findings.bytes_read += size
        self.metrics.scrubbed_bytes.labels(tier).inc(size)

    # --- in threads ---

    def _look(self, path: Path, chunk: PlacedChunk) -> FileDamage | None:
        with self.buffers.take(CHUNK_SIZE) as buffer:
            return _compare(path, chunk, buffer)[0]

    def _digest(self, path: Path, place: ByteRange) -> Digest | None:
        """None if the bytes are unreadable or incomplete."""
        with self.buffers.take(CHUNK_SIZE) as buffer:
            count, _ = _read(path, place, buffer)
            return digest_of(buffer[:count]) if count == place.size else None

    def _confirm(self, target: ScrubTarget, layout: FileLayout, damage: FileDamage) -> FileDamage | None:
        with self.buffers.take(CHUNK_SIZE) as buffer:
            if damage.chunk is None:
                still, count = _look_at_end(target.path, layout), _read_end(target.path, layout.size, buffer)
            else:
                still, count = _compare(target.path, damage.chunk, buffer)
            if still is not None:
                self.quarantine.keep(_evidence(target, still, self.clock()), buffer[:count])
            return still


def _look_at_end(path: Path, layout: FileLayout) -> FileDamage | None:
    """Checks for surplus bytes only.

    A file that is too short or whose size cannot be read is found by reading its chunks.
    """
    try:
        surplus = path.lstat().st_size - layout.size
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return FileDamage(f"the file is {surplus} bytes too long") if surplus > 0 else None


def _compare(path: Path, chunk: PlacedChunk, buffer: memoryview) -> tuple[FileDamage | None, int]:
    """The chunk's damage, and how many bytes of the chunk are in ``buffer``."""
    count, failure = _read(path, chunk.range, buffer)
    if failure:
        return FileDamage(f"it cannot be read: {failure}", chunk), 0
    found = digest_of(buffer[:count])
    if count < chunk.range.size:
        return FileDamage(f"the file ends {chunk.range.size - count} bytes before its chunk does", chunk, found), count
    if found != chunk.digest:
        return FileDamage("its content does not match its name", chunk, found), count
    return None, count


def _read(path: Path, place: ByteRange, buffer: memoryview) -> tuple[int, str]:
    try:
        with UncachedFile(path) as file:
            return file.read(buffer, place.start, place.size), ""
    except FileNotFoundError:
        raise
    except OSError as error:
        return 0, error.strerror or str(error)


def _read_end(path: Path, size: int, buffer: memoryview) -> int:
    with suppress(OSError), path.open("rb", buffering=0) as file:
        return os.preadv(file.fileno(), [buffer], size)
    return 0


def _evidence(target: ScrubTarget, damage: FileDamage, when: float) -> Evidence:
    chunk = damage.chunk
    return Evidence(
        when=when,
        tier=target.tier,
        file=target.shown or str(target.content),
        chunk=chunk.index if chunk else None,
        expected=str(chunk.digest if chunk else target.content),
        found=str(damage.found) if damage.found else None,
        reason=damage.reason,
    )
