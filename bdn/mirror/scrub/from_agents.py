"""Agents hold copies of what the store has lost: asking them costs the upstream nothing, and works without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.grant import Grant, GrantedMount
from bdn.core.store import Piece
from bdn.mirror.db import agents, origins
from bdn.mirror.db.database import Database
from bdn.mirror.db.origins import Origin
from bdn.mirror.db.tables import AgentRow
from bdn.mirror.scrub.repair import Restoring
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.grants import GrantSigner

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
