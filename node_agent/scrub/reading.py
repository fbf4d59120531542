"""Reading files again from the disk itself: each chunk is compared with its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE, ByteRange, chunk_count, chunk_range
from bdn.core.digest import Digest, digest_of, file_digest
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.disk.direct import UncachedFile
from bdn.transfer.buffers import BufferPool
from bdn.wire.operation_schema import Tier
from node_agent.background_tasks import in_thread
from node_agent.cache.quarantine import Evidence, Quarantine
from node_agent.scrub.findings import Damage, Findings, ScrubEvents, ScrubTarget


@dataclass(frozen=True)
class Examination:
    """Looks and keeps evidence; changes no content. Blocking; each call takes one of the ``buffers`` while it reads.

    Raises ``FileNotFoundError`` when the file is gone. What cannot be read is wrong, and no error.
    """

    buffers: BufferPool
    quarantine: Quarantine

    def look(self, path: Path, chunk: PlacedChunk) -> Damage | None:
        """What is wrong with this chunk."""
        with self.buffers.take(CHUNK_SIZE) as buffer:
            return _look(path, chunk, buffer)[0]

    def look_at_end(self, path: Path, layout: FileLayout) -> Damage | None:
        """Whether there is more than there should be.

        A file that is too short lacks chunks, and one of which the disk does not say how large it is cannot be read: that is
        what ``look`` finds.
        """
        try:
            surplus = path.lstat().st_size - layout.size
        except FileNotFoundError:
            raise
        except OSError:
            return None
        return Damage(f"the file is {surplus} bytes too long") if surplus > 0 else None

    def digest(self, path: Path, place: ByteRange) -> Digest | None:
        """The name of the bytes there; None when they cannot be read, or are not all there."""
        with self.buffers.take(CHUNK_SIZE) as buffer:
            count, _ = _read(path, place, buffer)
            return digest_of(buffer[:count]) if count == place.size else None

    def keep(self, subject: ScrubTarget, layout: FileLayout, wrong: Damage, when: float) -> Damage | None:
        """Look once more and, unless it was the reading that went wrong, keep the bytes as they are now."""
        with self.buffers.take(CHUNK_SIZE) as buffer:
            if wrong.chunk is None:
                still, count = self.look_at_end(subject.path, layout), _read_end(subject.path, layout.size, buffer)
            else:
                still, count = _look(subject.path, wrong.chunk, buffer)
            if still is not None:
                self.quarantine.keep(_evidence(subject, still, when), buffer[:count])
            return still


def _look(path: Path, chunk: PlacedChunk, buffer: memoryview) -> tuple[Damage | None, int]:
    """What is wrong, and how many bytes lie in the buffer now."""
    count, failure = _read(path, chunk.range, buffer)
    if failure:
        return Damage(f"it cannot be read: {failure}", chunk), 0
    found = digest_of(buffer[:count])
    if count < chunk.range.size:
        return Damage(f"the file ends {chunk.range.size - count} bytes before its chunk does", chunk, found), count
    if found != chunk.digest:
        return Damage("its bytes are not what its name says", chunk, found), count
    return None, count


def _read(path: Path, place: ByteRange, buffer: memoryview) -> tuple[int, str]:
    """How many bytes came, and why none did."""
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


def _evidence(subject: ScrubTarget, wrong: Damage, when: float) -> Evidence:
    chunk = wrong.chunk
    return Evidence(
        when=when,
        tier=subject.tier,
        file=subject.shown or str(subject.content),
        chunk=chunk.index if chunk else None,
        expected=str(chunk.digest if chunk else subject.content),
        found=str(wrong.found) if wrong.found else None,
        reason=wrong.reason,
    )


@dataclass(frozen=True)
class Reading:
    """Reads, and changes nothing. Raises ``FileNotFoundError`` when the file is gone."""

    examination: Examination
    events: ScrubEvents

    async def read(self, path: Path, layout: FileLayout, tier: Tier, findings: Findings) -> list[Damage]:
        """Everything that is wrong about a file."""
        wrong: list[Damage | None] = [await in_thread(self.examination.look_at_end, path, layout)]
        for chunk in layout.placed():
            await findings.pace(chunk.range.size)
            wrong.append(await in_thread(self.examination.look, path, chunk))
            self._count(tier, chunk.range.size, findings)
        return [one for one in wrong if one is not None]

    async def is_right(self, path: Path, content: Digest, size: int, findings: Findings) -> bool:
        """Whether a file has its name, when nobody can say which chunks it should have."""
        digests = []
        for index in range(chunk_count(size)):
            place = chunk_range(size, index)
            await findings.pace(place.size)
            digests.append(await in_thread(self.examination.digest, path, place))
            self._count("node", place.size, findings)
        known = [one for one in digests if one is not None]
        return len(known) == len(digests) and file_digest(size, known) == content

    async def keep(
        self, subject: ScrubTarget, layout: FileLayout, wrong: Sequence[Damage], when: float
    ) -> list[Damage]:
        """What is still wrong, with the evidence in quarantine."""
        again = [await in_thread(self.examination.keep, subject, layout, one, when) for one in wrong]
        return [one for one in again if one is not None]

    def _count(self, tier: Tier, size: int, findings: Findings) -> None:
        findings.read(size)
        self.events.scrubbed(tier, size)
