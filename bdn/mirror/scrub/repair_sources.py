"""Where the right bytes come from: agents, which cost the upstream nothing, and the upstream, at the mirrored revision."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import ByteRange, Digest, Manifest
from bdn.core.errors import BdnError, ChecksumMismatchError, SourceChangedError
from bdn.core.source.upstream import Checksum, Source
from bdn.core.source.uri import WeightsSource, common_beginnings
from bdn.core.store import Piece
from bdn.mirror.db import agents, origins
from bdn.mirror.db.database import Database
from bdn.mirror.db.origins import Origin
from bdn.mirror.db.tables import AgentRow
from bdn.mirror.ingest.survey import Surveyor
from bdn.mirror.scrub.repair import Restoring
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.mirror_schema import WeightsSourceBody

_AGENTS: Final = 4  # asked for one piece
_GRANT_SECONDS: Final = 300


@dataclass(frozen=True)
class AgentSource:
    """A ``PieceSource``: the data planes of living agents that hold a manifest which names the piece."""

    database: Database
    connections: ConnectionPool
    signer: GrantSigner
    clock: Callable[[], float] = time.time

    async def bring(self, restoring: Restoring) -> None:
        """Each piece from the first agent that sends it right."""
        async with self.database.read() as session:
            rows = await agents.all_agents(session)
        living = [row for row in rows if row.advertise and agents.is_alive(row, self.clock())]
        if living:
            for piece in tuple(restoring.missing):
                await self._bring(piece, living, restoring)

    async def _bring(self, piece: Piece, living: list[AgentRow], restoring: Restoring) -> None:
        async with self.database.read() as session:
            found = await origins.origins(session, piece.content.hex)
        asked = 0
        for origin in found:
            for row in living:
                if asked < _AGENTS and holds(row, origin.manifest):
                    asked += 1
                    if await self._ask(row, origin, piece, restoring):
                        return

    async def _ask(self, row: AgentRow, origin: Origin, piece: Piece, restoring: Restoring) -> bool:
        mount = GrantedMount("/repair", Digest(origin.manifest), origin.row.source)
        grant = self.signer.sign(Grant(origin.organisation, (mount,), self.clock() + _GRANT_SECONDS))
        # Without naming the manifest: an agent that owns the chunk and lacks it would ask us for it.
        reader = HttpChunkReader(self.connections, str(row.advertise), grant)
        try:
            await asyncio.to_thread(reader.read_into, PartialChunk(piece.name, restoring.place(piece)))
        except BdnError as error:
            restoring.note(f"agent {row.cluster}/{row.node}: {error}")
            return False
        if not restoring.take(piece):
            restoring.note(f"agent {row.cluster}/{row.node} has other bytes under this name")
            return False
        return True


def holds(row: AgentRow, manifest: str) -> bool:
    """Whether the agent said so."""
    return any(holding["manifest"] == f"b3:{manifest}" for holding in row.holdings)


logger = logging.getLogger(__name__)

_JOB = "repair"  # whom identity tokens are for, in place of a mirror


@dataclass(frozen=True)
class UpstreamSource:
    """A ``PieceSource``."""

    database: Database
    surveyor: Surveyor
    reader: UpstreamReader

    async def bring(self, restoring: Restoring) -> None:
        """Source by source, the newest first, each opened once for all that it can give."""
        tried: set[tuple[str, str]] = set()
        while (origin := await self._next(restoring, tried)) is not None:
            tried.add((origin.organisation, origin.row.source))
            try:
                await self._bring_from(origin, restoring)
            except BdnError as error:
                restoring.note(str(error), origin.organisation)

    async def _next(self, restoring: Restoring, tried: set[tuple[str, str]]) -> Origin | None:
        """A source that was not tried and is said to have something that is missing."""
        async with self.database.read() as session:
            for piece in restoring.missing:
                for origin in await origins.origins(session, piece.content.hex):
                    if (origin.organisation, origin.row.source) not in tried:
                        return origin
        return None

    async def _bring_from(self, origin: Origin, restoring: Restoring) -> None:
        wanted = {piece.content: piece for piece in restoring.missing}
        paths = await self.paths(origin, wanted.keys())
        if not paths:
            return
        async with self.files(origin, paths) as files:
            for path, content in paths.items():
                located, piece = files.get(path), wanted[content]
                if located is None or located.file.size != piece.content_size:
                    restoring.note(_has_changed(path, origin.row.source), origin.organisation)
                    continue
                problem = await self._bring_piece(located, piece, restoring)
                if problem is not None:
                    restoring.note(problem, origin.organisation)

    @asynccontextmanager
    async def opened(self, origin: Origin) -> AsyncIterator[tuple[WeightsSource, Source]]:
        """The source, at the revision that was mirrored."""
        wanted = WeightsSourceBody.model_validate(origin.row.request).to_core()
        async with self.surveyor.open(wanted, origin.organisation, _JOB, origin.row.resolved_revision) as source:
            yield wanted, source

    @asynccontextmanager
    async def files(self, origin: Origin, paths: Collection[str]) -> AsyncIterator[dict[str, LocatedFile]]:
        """Its files at these paths, as they are there now."""
        async with self.opened(origin) as (_, source):
            resolution = await source.resolve()
            yield {
                file.path: LocatedFile(origin.row.source, source, file)
                async for file in source.list(resolution, common_beginnings(paths))
                if file.path in paths
            }

    async def paths(self, origin: Origin, contents: Collection[Digest]) -> dict[str, Digest]:
        """Under which path the origin's manifest names each of these; one object has each content once."""
        async with self.database.read() as session:
            canonical = await origins.canonical(session, origin.manifest)
        return {} if canonical is None else await asyncio.to_thread(_paths_in, canonical, contents)

    async def _bring_piece(self, located: LocatedFile, piece: Piece, restoring: Restoring) -> str | None:
        """None when it is there; otherwise why not."""

        def accept(content: memoryview, _: Checksum | None) -> None:
            restoring.place(piece)[:] = content
            if not restoring.take(piece):
                raise ChecksumMismatchError(located.subject, f"a piece called {piece.name}", "another one")

        async def once_more(located: LocatedFile, _: bytes, error: ChecksumMismatchError) -> None:
            logger.warning("a repair read wrong content", extra={"subject": located.subject, "error": str(error)})

        wanted = FileRange(located, ByteRange(piece.start, piece.start + piece.size), accept)
        try:
            await self.reader.read([wanted], on_wrong=once_more)
        except SourceChangedError as error:
            return str(error)
        except ChecksumMismatchError:
            return _has_changed(located.file.path, located.name)
        return None


def _paths_in(canonical: bytes, contents: Collection[Digest]) -> dict[str, Digest]:
    paths = {file.digest: file.path for file in reversed(Manifest.parse(canonical).files) if file.digest in contents}
    return {path: digest for digest, path in paths.items()}


def _has_changed(path: str, source: str) -> str:
    return f"{path!r} of {source} is not what was mirrored any more; mirror {source} again"
