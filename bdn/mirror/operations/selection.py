"""What a prefetch is of, and where to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.agents.liveness import is_alive
from bdn.mirror.db import agents, mirrors, prefetches
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.tables import AgentRow, MirrorSourceRow
from bdn.wire.operation_schema import PrefetchRequest

Mount = dict[str, Any]
_ANYWHERE: Final = "/prefetched"  # a grant names mounts, and these are never shown


@dataclass(frozen=True)
class Selection:
    """Reads the database; changes nothing."""

    database: Database

    async def mounts(self, request: PrefetchRequest, organisation: str) -> list[Mount]:
        """Manifests as mounts of a grant.

        Raises:
            InvalidRequestError: the digest is none, or the mirror is not READY.
            NotFoundError: nothing that is held by the mirror, or nothing of this organisation.
        """
        async with self.database.read() as session:
            if request.mirror_id is not None:
                found = await self._of_mirror(session, request.mirror_id, organisation)
            elif request.manifest is not None:
                found = await self._of_manifest(session, request.manifest, organisation)
            else:
                found = await self._of_source(session, request.source or "", organisation)
            held = await mirrors.readable(session, organisation, [mount["manifest"] for mount in found])
        for mount in found:
            if mount["manifest"] not in held:
                raise NotFoundError(f"manifest b3:{mount['manifest']} on the mirror")
        return found

    async def _of_mirror(self, session: ReadSession, mirror_id: str, organisation: str) -> list[Mount]:
        found = await mirrors.get(session, mirror_id, organisation)
        if found is None:
            raise NotFoundError(f"mirror {mirror_id}")
        row, sources = found
        if row.status != "READY":
            raise InvalidRequestError(f"mirror {mirror_id} is {row.status}; what is prefetched must be READY")
        return [_mount(source, source.mount_location) for source in sources]

    async def _of_manifest(self, session: ReadSession, text: str, organisation: str) -> list[Mount]:
        try:
            digest = Digest.parse(text)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        names = (await mirrors.sources_by_manifest(session, organisation, [digest.hex])).get(digest.hex)
        if not names:
            raise NotFoundError(f"manifest {digest}")
        return [{"mount_location": _ANYWHERE, "manifest": digest.hex, "source": names[0]}]

    async def _of_source(self, session: ReadSession, source: str, organisation: str) -> list[Mount]:
        newest = await prefetches.newest_ready(session, organisation, source)
        if newest is None:
            raise NotFoundError(f"a READY mirror of {source}")
        return [_mount(newest, _ANYWHERE)]

    async def nodes(self, request: PrefetchRequest) -> list[AgentRow]:
        """The agents that shall hold it: of a cluster those that live, of named ones all.

        Raises:
            InvalidRequestError: a named agent keeps no files for jobs.
            NotFoundError: nobody of that name is known, or nobody lives in that cluster.
        """
        async with self.database.read() as session:
            rows = await agents.all_agents(session)
        there = [row for row in rows if request.cluster in (None, row.cluster)]
        if request.nodes:
            return [row for name in dict.fromkeys(request.nodes) for row in _named(name, there)]
        living = [row for row in there if "node" in row.roles and is_alive(row, time.time())]
        if not living:
            raise NotFoundError(f"a living agent with the role node in cluster {request.cluster}")
        return living


def _named(name: str, rows: list[AgentRow]) -> list[AgentRow]:
    found = [row for row in rows if row.node == name]
    if not found:
        raise NotFoundError(f"agent {name}")
    if not any("node" in row.roles for row in found):
        raise InvalidRequestError(f"agent {name} has not the role node: it keeps no files for jobs")
    return [row for row in found if "node" in row.roles]


def _mount(source: MirrorSourceRow, mount_location: str) -> Mount:
    return {"mount_location": mount_location, "manifest": source.manifest, "source": source.source}
