"""Evictions across tiers: agents decide about their caches and report, the mirror decides about its store, all is recorded."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError
from bdn.mirror.cluster.liveness import is_alive
from bdn.mirror.database import Database
from bdn.mirror.eviction.store_eviction import StoreEviction
from bdn.mirror.repository import agents, evictions, mirrors
from bdn.mirror.shared_look import SharedLook
from bdn.mirror.tables import AgentRow, EvictionRow
from bdn.mirror.watch import Watch, agent_topic
from bdn.wire.errors import ErrorBody, body_of
from bdn.wire.eviction_schema import EvictCommand, EvictedItem, Eviction, EvictionRequest, EvictReport
from bdn.wire.moments import moment

ANSWER_SECONDS: Final = 45.0  # an agent that has not answered by then is reported as unreachable
_LOOK_AGAIN_SECONDS: Final = 0.5


@dataclass
class Evictions:
    """The service behind ``/evictions``."""

    database: Database
    store_eviction: StoreEviction
    watch: Watch

    def __post_init__(self) -> None:
        self._running = SharedLook(self._look_for_running, _LOOK_AGAIN_SECONDS)  # every open heartbeat asks for them

    async def start(self, request: EvictionRequest, organisation: str) -> Eviction:
        """Record the eviction, do the mirror's part, and queue the agents' parts.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: no such source was mirrored, or no agent of that name was ever heard of.
        """
        request.check()
        manifests = await self._manifests(request, organisation)
        command = EvictCommand(
            id=f"evi_{secrets.token_hex(12)}",
            tier=request.tier,
            manifests=manifests,
            job=request.job,
            lru_bytes=request.lru_bytes,
            all=request.all,
            dry_run=request.dry_run,
            force=request.force,
        )
        async with self.database.read() as session:
            rows = await agents.all_agents(session)
        asked = [row for row in rows if _concerns(request, row)]
        if not asked and (request.node is not None or request.cluster is not None):
            raise NotFoundError(f"an agent of {request.cluster or 'any cluster'}, {request.node or 'any node'}")
        alive = [row for row in asked if is_alive(row, time.time())]
        row = EvictionRow(
            id=command.id,
            organisation=organisation,
            status="RUNNING",
            created_at=time.time(),
            request=request.model_dump(),
            command=command.model_dump(),
            items=[],
            pending=[_name(agent) for agent in alive],
            unreachable=[_name(agent) for agent in asked if agent not in alive],
        )
        async with self.database.write() as session:
            await evictions.insert(session, row)
        self._running.forget()
        for agent in alive:
            self.watch.notify(agent_topic(agent.cluster, agent.node))
        if _concerns_mirror(request):
            await self._evict_here(command, organisation)
        return await self._settle(command.id)

    async def _evict_here(self, command: EvictCommand, organisation: str) -> None:
        try:
            await self.store_eviction.run(command, organisation)
        except BdnError as error:
            async with self.database.write() as session:
                row = await evictions.change(session, command.id)
                if row is not None and row.doomed is None:  # otherwise only the deleting is left, and will be done
                    row.error = body_of(error).model_dump()
            raise

    async def _manifests(self, request: EvictionRequest, organisation: str) -> list[str] | None:
        """What a selector by source or manifest names; None for the other selectors."""
        if request.manifest is not None:
            try:
                return [str(Digest.parse(request.manifest))]
            except ValueError as error:
                raise InvalidRequestError(str(error)) from error
        if request.source is None:
            return None
        async with self.database.read() as session:
            found = await mirrors.manifests_of(session, organisation, request.source.rstrip("/"))
            found = found or await mirrors.manifests_of(session, organisation, request.source)
        if not found:
            raise NotFoundError(f"a mirrored source {request.source}")
        return [f"b3:{digest}" for digest in found]

    async def commands_for(self, cluster: str, node: str) -> list[EvictCommand]:
        """What an agent has not answered yet and still may."""
        name, now = f"{cluster}/{node}", time.time()
        rows = await self._running.get()
        return [
            EvictCommand.model_validate(row.command) for row in rows if name in row.pending and not _is_late(row, now)
        ]

    async def _look_for_running(self) -> list[EvictionRow]:
        async with self.database.read() as session:
            return await evictions.running(session)

    async def take_report(self, cluster: str, node: str, report: EvictReport) -> None:
        """An agent's answer; one that nobody waits for is passed over."""
        name = f"{cluster}/{node}"
        async with self.database.write() as session:
            row = await evictions.change(session, report.id)
            if row is None or name not in row.pending:
                return
            row.items = [*row.items, *(item.model_dump() for item in report.items)]
            row.pending = [other for other in row.pending if other != name]
            if report.error is not None:
                row.error = report.error.model_dump()
        self._running.forget()
        await self._settle(report.id)

    async def get(self, eviction_id: str, wait_seconds: float = 0) -> Eviction:
        """The eviction, once it is settled or when the time is over."""
        deadline = time.monotonic() + wait_seconds
        eviction = await self._settle(eviction_id)
        while eviction.status == "RUNNING" and not self.watch.stopping and (left := deadline - time.monotonic()) > 0:
            await self.watch.changed(eviction_id, min(left, _LOOK_AGAIN_SECONDS))
            eviction = await self._settle(eviction_id)
        return eviction

    async def _settle(self, eviction_id: str) -> Eviction:
        """Close an eviction when everybody answered, or when those who did not have had their time."""
        async with self.database.read() as session:
            row = await evictions.get(session, eviction_id)
        if row is None:
            raise NotFoundError(f"eviction {eviction_id}")
        if row.status == "RUNNING" and row.doomed is None and (not row.pending or _is_late(row, time.time())):
            async with self.database.write() as session:
                row = await evictions.change(session, eviction_id) or row
                if row.status == "RUNNING":
                    row.unreachable = [*row.unreachable, *row.pending]
                    row.pending = []
                    row.status = _outcome(row)
                    row.completed_at = time.time()
            self.watch.notify(eviction_id)
        return await self._view(row)

    async def _view(self, row: EvictionRow) -> Eviction:
        items = [EvictedItem.model_validate(item) for item in row.items]
        manifests = [item.manifest.removeprefix("b3:") for item in items]
        async with self.database.read() as session:
            sources = await mirrors.sources_by_manifest(session, row.organisation, manifests) if items else {}
        for item, manifest in zip(items, manifests, strict=True):
            item.sources = sources.get(manifest, [])
        return Eviction(
            id=row.id,
            status=row.status,  # type: ignore[arg-type] # the column holds nothing else
            created_at=moment(row.created_at),
            completed_at=moment(row.completed_at) if row.completed_at else None,
            request=EvictionRequest.model_validate(row.request),
            items=items,
            unreachable=row.unreachable,
            bytes_freed=sum(item.bytes for item in items if not item.refused),
            error=ErrorBody.model_validate(row.error) if row.error else None,
        )


def _is_late(row: EvictionRow, now: float) -> bool:
    """Whether the agents' time is over: nobody carries out today what an operator gave up yesterday."""
    return now - row.created_at > ANSWER_SECONDS


def _outcome(row: EvictionRow) -> str:
    if row.error is not None or row.unreachable:
        return "FAILED"
    return "REFUSED" if any(item["refused"] for item in row.items) else "DONE"


def _name(row: AgentRow) -> str:
    return f"{row.cluster}/{row.node}"


def _concerns(request: EvictionRequest, row: AgentRow) -> bool:
    """Whether a tier of this agent is selected. Whatever its role, it may hold chunks from when it had another one."""
    return (
        request.tier in (None, "node", "cluster")
        and (request.cluster is None or request.cluster == row.cluster)
        and (request.node is None or request.node == row.node)
    )


def _concerns_mirror(request: EvictionRequest) -> bool:
    narrowed = request.cluster is not None or request.node is not None
    spared = request.lru_bytes is not None or request.job is not None
    return request.tier == "mirror" or (request.tier is None and not narrowed and not spared)
