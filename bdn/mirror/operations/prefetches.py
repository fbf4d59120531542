"""Prefetches: agents are told through their heartbeats, go on until they are done or have failed, and all is recorded."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.grant import Grant, GrantedMount
from bdn.mirror.agents.liveness import is_alive
from bdn.mirror.db import agents, prefetches
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import PrefetchNodeRow, PrefetchRow
from bdn.mirror.operations.selection import Selection
from bdn.mirror.single_flight import SharedRead
from bdn.mirror.watch import Watch, agent_topic
from bdn.wire.grants import GrantSigner
from bdn.wire.operation_schema import Prefetch, PrefetchCommand, PrefetchNode, PrefetchReport, PrefetchRequest
from bdn.wire.shapes import moment

SILENT_SECONDS: Final = 120.0  # an agent that restarts is back by then, and goes on
_LOOK_AGAIN_SECONDS: Final = 1.0
_OPEN: Final = ("PENDING", "RUNNING")


class Prefetches:
    """The service behind ``/prefetches``."""

    def __init__(self, database: Database, signer: GrantSigner, grant_seconds: int, watch: Watch) -> None:
        self._database = database
        self._selection = Selection(database)
        self._signer = signer
        self._grant_seconds = grant_seconds
        self._watch = watch
        self._began_at = time.time()
        self._open = SharedRead(self._open_parts, _LOOK_AGAIN_SECONDS)

    async def start(self, request: PrefetchRequest, organisation: str) -> Prefetch:
        """Record it and tell the agents. Raises what ``Selection`` raises."""
        request.check()
        mounts = await self._selection.mounts(request, organisation)
        chosen = await self._selection.nodes(request)
        now = time.time()
        row = PrefetchRow(
            id=f"pre_{secrets.token_hex(12)}",
            organisation=organisation,
            status="RUNNING",
            created_at=now,
            request=request.model_dump(),
            mounts=mounts,
        )
        parts = [
            PrefetchNodeRow(
                prefetch=row.id,
                cluster=agent.cluster,
                node=agent.node,
                state="PENDING" if is_alive(agent, now) else "UNREACHABLE",
                bytes_from={},
            )
            for agent in chosen
        ]
        async with self._database.write() as session:
            await prefetches.insert(session, row, parts)
        self._open.forget()
        for part in parts:
            self._watch.notify(agent_topic(part.cluster, part.node))
        return await self._settle(row.id, organisation)

    async def commands_for(self, cluster: str, node: str, reported: Collection[str]) -> list[PrefetchCommand]:
        """What an agent has not ended, but for those that it reported to be at work on."""
        wanted = (await self._open.get()).get((cluster, node), ())
        commands: list[PrefetchCommand] = []
        for prefetch_id in wanted:
            if prefetch_id not in reported:
                async with self._database.read() as session:
                    row = await prefetches.get(session, prefetch_id)
                commands += [] if row is None else [PrefetchCommand(id=row.id, grant=self._grant(row))]
        return commands

    async def take_report(self, cluster: str, node: str, report: PrefetchReport) -> None:
        """How far an agent is; what has ended stays as it is."""
        values = report.model_dump(include={"state", "bytes_total", "bytes_from", "error"})
        async with self._database.write() as session:
            is_taken = await prefetches.set_part(session, report.id, cluster, node, **values)
        if is_taken and report.state != "RUNNING":
            self._open.forget()
            await self._close(report.id)

    async def get(self, prefetch_id: str, organisation: str, wait_seconds: float = 0) -> Prefetch:
        """The prefetch, once all nodes have ended or when the time is over."""
        return await self._watch.look_until(
            prefetch_id,
            partial(self._settle, prefetch_id, organisation),
            lambda seen: seen.status != "RUNNING",
            wait_seconds,
            _LOOK_AGAIN_SECONDS,
        )

    async def _settle(self, prefetch_id: str, organisation: str) -> Prefetch:
        """As it is now; nodes whose agents are gone for good have had their time."""
        row, parts = await self._read(prefetch_id)
        if row is None or row.organisation != organisation:
            raise NotFoundError(f"prefetch {prefetch_id}")
        if row.status == "RUNNING":
            await self._give_up_silent(parts)
            await self._close(prefetch_id)
            row, parts = await self._read(prefetch_id)
            assert row is not None  # noqa: S101 - nothing deletes them
        return _view(row, parts)

    async def _close(self, prefetch_id: str) -> None:
        _, parts = await self._read(prefetch_id)
        if any(part.state in _OPEN for part in parts):
            return
        status = "READY" if all(part.state == "READY" for part in parts) else "FAILED"
        async with self._database.write() as session:
            await prefetches.finish(session, prefetch_id, status, time.time())
        self._watch.notify(prefetch_id)

    async def _give_up_silent(self, parts: Sequence[PrefetchNodeRow]) -> None:
        now = time.time()
        if now - self._began_at < SILENT_SECONDS:
            return  # it was us whom nobody could reach
        for part in parts:
            if part.state in _OPEN:
                async with self._database.read() as session:
                    agent = await agents.who_is(session, part.cluster, part.node)
                if agent is None or now - agent.last_heartbeat >= SILENT_SECONDS:
                    async with self._database.write() as session:
                        await prefetches.set_part(session, part.prefetch, part.cluster, part.node, state="UNREACHABLE")
                    self._open.forget()

    async def _read(self, prefetch_id: str) -> tuple[PrefetchRow | None, list[PrefetchNodeRow]]:
        async with self._database.read() as session:
            return await prefetches.get(session, prefetch_id), await prefetches.nodes_of(session, prefetch_id)

    async def _open_parts(self) -> dict[tuple[str, str], list[str]]:
        async with self._database.read() as session:
            parts = await prefetches.open_parts(session)
        found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for cluster, node, prefetch_id in parts:
            found[cluster, node].append(prefetch_id)
        return found

    def _grant(self, row: PrefetchRow) -> str:
        """Made anew for each command: a node that was away for days gets one that is valid."""
        mounts = tuple(
            GrantedMount(mount["mount_location"], Digest(mount["manifest"]), mount["source"]) for mount in row.mounts
        )
        return self._signer.sign(Grant(row.organisation, mounts, time.time() + self._grant_seconds))


def _view(row: PrefetchRow, parts: Sequence[PrefetchNodeRow]) -> Prefetch:
    return Prefetch.model_validate(
        {
            "id": row.id,
            "status": row.status,
            "created_at": moment(row.created_at),
            "completed_at": moment(row.completed_at) if row.completed_at else None,
            "request": row.request,
            "manifests": [f"b3:{mount['manifest']}" for mount in row.mounts],
            "sources": [mount["source"] for mount in row.mounts],
            "nodes": [PrefetchNode.model_validate(part, from_attributes=True) for part in parts],
        }
    )
