"""A file is read again from beginning to end, at the pace that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import chunk_count, chunk_range
from bdn.core.digest import Digest, file_digest
from bdn.core.store.layout import FileLayout
from bdn.wire.eviction_schema import Tier
from node_agent.background_tasks import in_thread
from node_agent.scrub.examination import Examination
from node_agent.scrub.findings import Findings, ScrubEvents
from node_agent.scrub.subject import Subject, Wrong


@dataclass(frozen=True)
class Reading:
    """Reads, and changes nothing. Raises ``FileNotFoundError`` when the file is gone."""

    examination: Examination
    events: ScrubEvents

    async def read(self, path: Path, layout: FileLayout, tier: Tier, findings: Findings) -> list[Wrong]:
        """Everything that is wrong about a file."""
        wrong: list[Wrong | None] = [await in_thread(self.examination.look_at_end, path, layout)]
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

    async def keep(self, subject: Subject, layout: FileLayout, wrong: Sequence[Wrong], when: float) -> list[Wrong]:
        """What is still wrong, with the evidence in quarantine."""
        again = [await in_thread(self.examination.keep, subject, layout, one, when) for one in wrong]
        return [one for one in again if one is not None]

    def _count(self, tier: Tier, size: int, findings: Findings) -> None:
        findings.read(size)
        self.events.scrubbed(tier, size)
