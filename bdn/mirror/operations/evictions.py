"""Evictions across tiers: agents decide about their caches and report, the mirror decides about its store, all is recorded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError
from bdn.mirror.access import selectors
from bdn.mirror.agents.addressees import asks_mirror
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.tables import EvictionRow
from bdn.mirror.operations.commands import Asking
from bdn.mirror.retention.store_eviction import StoreEviction
from bdn.mirror.watch import Watch
from bdn.wire.errors import ErrorBody, body_of
from bdn.wire.operation_schema import EvictCommand, EvictedItem, Eviction, EvictionRequest, EvictReport
from bdn.wire.shapes import moment

ANSWER_SECONDS: Final = 45.0  # an agent that has not answered by then is reported as unreachable


@dataclass
class Evictions:
    """The service behind ``/evictions``."""

    database: Database
    store_eviction: StoreEviction
    watch: Watch
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._asking = Asking(
            EvictionRow,
            "eviction",
            self.database,
            self.watch,
            self.clock,
            given_up=self._given_up,
            verdict=lambda row: "REFUSED" if any(item["refused"] for item in row.items) else "DONE",
        )

    async def start(self, request: EvictionRequest, organisation: str) -> Eviction:
        """Record the eviction, do the mirror's part, and queue the agents' parts.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: no such source or manifest was mirrored, or no agent of that name was ever heard of.
        """
        request.check()
        command = EvictCommand(
            id=f"evi_{secrets.token_hex(12)}",
            tier=request.tier,
            manifests=await self._manifests(request, organisation),
            job=request.job,
            lru_bytes=request.lru_bytes,
            all=request.all,
            dry_run=request.dry_run,
            force=request.force,
            asked_by=f"an operator of {organisation}",
            organisation=organisation,
        )
        is_for_mirror = _asks_mirror(request)
        await self._asking.begin(command.id, organisation, request, command, is_for_mirror=is_for_mirror)
        if is_for_mirror:
            try:
                await self.store_eviction.run(command, organisation)
            except BdnError as error:
                await self._asking.fail_here(command.id, body_of(error))
                raise
        return await self._view(await self._asking.settle(command.id, organisation))

    async def _manifests(self, request: EvictionRequest, organisation: str) -> list[str] | None:
        """What a selector by source or manifest names; None for the other selectors."""
        if request.manifest is None and request.source is None:
            return None
        async with self.database.read() as session:
            if request.manifest is not None:
                found = await selectors.of_manifest(session, organisation, request.manifest)
            else:
                found = await selectors.of_source(session, organisation, request.source or "")
        return [f"b3:{digest}" for digest in found]

    async def commands_for(self, cluster: str, node: str) -> list[EvictCommand]:
        """What an agent has not answered yet and still may."""
        rows = await self._asking.pending_at(cluster, node)
        return [EvictCommand.model_validate(row.command) for row in rows if not _is_late(row, self.clock())]

    async def take_report(self, cluster: str, node: str, report: EvictReport) -> None:
        """An agent's answer."""

        def add(row: EvictionRow) -> None:
            row.items = [*row.items, *(item.model_dump(mode="json") for item in report.items)]

        await self._asking.answer(report.id, cluster, node, add, report.error)

    async def get(self, eviction_id: str, organisation: str, wait_seconds: float = 0) -> Eviction:
        """The eviction, once it is settled or when the time is over; ``NotFoundError`` also when it is another organisation's."""
        return await self._view(await self._asking.get(eviction_id, organisation, wait_seconds))

    async def _given_up(self, _: ReadSession, row: EvictionRow) -> list[str]:
        return row.pending if _is_late(row, self.clock()) else []

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


def _asks_mirror(request: EvictionRequest) -> bool:
    """What is named by its age or by a job is in the caches of nodes, unless the mirror's tier is named as well."""
    is_spared = request.tier is None and (request.lru_bytes is not None or request.job is not None)
    return asks_mirror(request) and not is_spared
