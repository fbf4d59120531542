"""Prefetches: agents are told through their heartbeats, and go on until they are done or have failed."""

import time
from dataclasses import dataclass
from typing import Any, Final

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.db import agents, mirrors
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.tables import AgentRow, OperationPartRow, OperationRow
from bdn.mirror.operations.operations import PREFETCH, Operations, OperationState
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.operation_schema import Prefetch, PrefetchCommand, PrefetchNode, PrefetchRequest

_ANYWHERE: Final = "/prefetched"  # a grant names mounts, and these are never shown
_Mount = dict[str, Any]


@dataclass(frozen=True)
class Prefetches:
    """The service behind ``/prefetches``."""

    database: Database
    operations: Operations
    signer: GrantSigner
    grant_seconds: int

    async def start(self, request: PrefetchRequest, organisation: str, wait_seconds: float = 0) -> Prefetch:
        """Record it and tell the agents.

        Raises:
            InvalidRequestError: the digest is none, the mirror is not READY, or a named agent keeps no files for jobs.
            NotFoundError: nothing of this organisation that the mirror holds, or no such agents.
        """
        request.check()
        mounts = await self._mounts(request, organisation)
        prefetch_id = await self.operations.begin(
            PREFETCH,
            request,
            lambda _: {"mounts": mounts},
            organisation=organisation,
            agents=await self._agents(request),
        )
        return await self.get(prefetch_id, organisation, wait_seconds)

    async def _mounts(self, request: PrefetchRequest, organisation: str) -> list[_Mount]:
        """Manifests as mounts of a grant."""
        async with self.database.read() as session:
            found = await self._named(session, request, organisation)
            held = await mirrors.readable(session, organisation, [mount["manifest"] for mount in found])
        for mount in found:
            if mount["manifest"] not in held:
                raise NotFoundError(f"manifest b3:{mount['manifest']} on the mirror")
        return found

    @staticmethod
    async def _named(session: ReadSession, request: PrefetchRequest, organisation: str) -> list[_Mount]:
        if request.manifest is not None:
            [digest] = await mirrors.named_manifests(session, organisation, request.manifest, None)
            [source, *_] = (await mirrors.sources_by_manifest(session, organisation, [digest]))[digest]
            return [_mount(digest, source)]
        if request.mirror_id is None:
            newest = await mirrors.newest_ready(session, organisation, request.source or "")
            if newest is None:
                raise NotFoundError(f"a READY mirror of {request.source}")
            return [_mount(newest.manifest, newest.source)]
        mirror = await mirrors.get(session, request.mirror_id, organisation)
        if mirror is None:
            raise NotFoundError(f"mirror {request.mirror_id}")
        row, sources = mirror
        if row.status != "READY":
            raise InvalidRequestError(f"mirror {row.id} is {row.status}; what is prefetched must be READY")
        return [_mount(source.manifest, source.source, source.mount_location) for source in sources]

    async def _agents(self, request: PrefetchRequest) -> list[AgentRow]:
        """The agents that shall hold it: of a cluster those that live, of named ones all."""
        async with self.database.read() as session:
            rows = await agents.all_agents(session)
        there = [row for row in rows if request.cluster in (None, row.cluster)]
        if request.nodes:
            return [row for name in dict.fromkeys(request.nodes) for row in _of_name(name, there)]
        living = [row for row in there if "node" in row.roles and agents.is_alive(row, time.time())]
        if not living:
            raise NotFoundError(f"a living agent with the role node in cluster {request.cluster}")
        return living

    def command(self, row: OperationRow) -> PrefetchCommand:
        """What an agent is told. The grant is made anew: a node that was away for days gets one that is valid."""
        mounts = tuple(
            GrantedMount(mount["mount_location"], Digest(mount["manifest"]), mount["source"])
            for mount in row.command["mounts"]
        )
        grant = Grant(row.organisation or "", mounts, time.time() + self.grant_seconds)
        return PrefetchCommand(id=row.id, grant=self.signer.sign(grant))

    async def get(self, prefetch_id: str, organisation: str, wait_seconds: float = 0) -> Prefetch:
        """The prefetch, once all nodes have ended or when the time is over."""
        return _document(await self.operations.get(PREFETCH, prefetch_id, organisation, wait_seconds))


def _of_name(name: str, rows: list[AgentRow]) -> list[AgentRow]:
    found = [row for row in rows if row.node == name]
    if not found:
        raise NotFoundError(f"agent {name}")
    if not any("node" in row.roles for row in found):
        raise InvalidRequestError(f"agent {name} has not the role node: it keeps no files for jobs")
    return [row for row in found if "node" in row.roles]


def _mount(manifest: str | None, source: str, mount_location: str = _ANYWHERE) -> _Mount:
    return {"mount_location": mount_location, "manifest": manifest, "source": source}


def _document(operation: OperationState) -> Prefetch:
    mounts = operation.row.command["mounts"]
    return Prefetch.model_validate(
        operation.document()
        | {
            "manifests": [f"b3:{mount['manifest']}" for mount in mounts],
            "sources": [mount["source"] for mount in mounts],
            "nodes": [_node(part) for part in operation.parts],
        }
    )


def _node(part: OperationPartRow) -> PrefetchNode:
    state = "READY" if part.state == "DONE" else part.state
    place = {"cluster": part.cluster, "node": part.node, "state": state, "error": part.error}
    return PrefetchNode.model_validate(place | part.result)
