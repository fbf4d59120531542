"""What a running mirror has done since it last told the database: chunks, complete files, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.layout import FileLayout
from bdn.mirror.database import Database
from bdn.mirror.repository import contents, mirrors


@dataclass
class SourceCounters:
    """Bytes of one source so far; ``changed`` says that the database does not know yet."""

    transferred: int = 0
    reused: int = 0
    changed: bool = False


@dataclass
class Progress:
    """Collects on the event loop and writes in batches: a killed worker loses the last batch and nothing else.

    Everything reported here is durable in the store already, so the database never knows more than the store holds.
    """

    database: Database
    mirror_id: str
    on_flushed: Callable[[list[str]], None]
    on_transferred: Callable[[int], None]
    counters: dict[int, SourceCounters] = field(default_factory=dict)
    _chunks: list[tuple[str, int, Digest]] = field(default_factory=list)
    _complete: dict[str, FileLayout] = field(default_factory=dict)

    def chunk_stored(self, position: int, identity_key: str, index: int, digest: Digest, size: int) -> None:
        """A chunk came from the upstream and is durable."""
        self._chunks.append((identity_key, index, digest))
        counters = self.counters[position]
        counters.transferred += size
        counters.changed = True
        self.on_transferred(size)

    def reused(self, position: int, size: int) -> None:
        """Count bytes that somebody else copied meanwhile."""
        counters = self.counters[position]
        counters.reused += size
        counters.changed = True

    def file_complete(self, identity_key: str, layout: FileLayout) -> None:
        """All chunks of a file are durable and its checksum is right."""
        self._complete[identity_key] = layout

    def drop(self, identity_key: str) -> None:
        """What was recorded of a file is wrong."""
        self._chunks = [chunk for chunk in self._chunks if chunk[0] != identity_key]

    async def flush(self) -> None:
        """Tell the database, in one transaction."""
        chunks, self._chunks = self._chunks, []
        complete, self._complete = self._complete, {}
        changed = {position: counters for position, counters in self.counters.items() if counters.changed}
        if not (chunks or complete or changed):
            return
        async with self.database.write() as session:
            await contents.record_chunks(session, [chunk for chunk in chunks if chunk[0] not in complete])
            await contents.record_contents(session, complete)
            for position, counters in changed.items():
                counters.changed = False
                await mirrors.update_source(
                    session,
                    self.mirror_id,
                    position,
                    bytes_transferred=counters.transferred,
                    bytes_reused=counters.reused,
                )
        self.on_flushed(list(complete))
