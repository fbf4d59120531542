"""Verifications across tiers: agents read their caches and report, the keeper reads the store, all is recorded.

Reading takes as long as it takes: an agent has no time limit so long as it is heard of.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.access import selectors
from bdn.mirror.agents.addressees import MIRROR, asks_mirror, name_of
from bdn.mirror.agents.liveness import is_alive
from bdn.mirror.damages import DAMAGE
from bdn.mirror.db import agents, mirrors
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.tables import VerificationRow
from bdn.mirror.operations.commands import Asking
from bdn.mirror.scrub.repair_grants import Lending
from bdn.mirror.watch import Watch
from bdn.wire.errors import ErrorBody
from bdn.wire.operation_schema import (
    DamagedItem,
    Verification,
    VerificationRequest,
    VerifyCommand,
    VerifyReport,
)
from bdn.wire.shapes import added, moment


@dataclass
class Verifications:
    """The service behind ``/verifications``."""

    database: Database
    watch: Watch
    lending: Lending
    clock: Callable[[], float]
    _told: dict[str, set[str]] = field(default_factory=dict)  # by agent: what its open heartbeat was answered for

    def __post_init__(self) -> None:
        self._asking = Asking(
            VerificationRow,
            "verification",
            self.database,
            self.watch,
            self.clock,
            given_up=self._silent,
            verdict=lambda row: "DAMAGED" if any(item["outcome"] != "repaired" for item in row.items) else "DONE",
        )

    async def start(self, request: VerificationRequest, organisation: str) -> Verification:
        """Record it and tell those who shall read.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: no such source or manifest was mirrored, or no agent of that name was ever heard of.
        """
        request.check()
        async with self.database.read() as session:
            manifests = await self._manifests(session, request, organisation)
        command = VerifyCommand(
            id=f"ver_{secrets.token_hex(12)}",
            tier=request.tier,
            manifests=manifests,
            all=request.all,
            repair=request.repair,
        )
        await self._asking.begin(command.id, organisation, request, command, is_for_mirror=asks_mirror(request))
        self.watch.notify(DAMAGE)
        return _view(await self._asking.settle(command.id, organisation))

    async def _manifests(
        self, session: ReadSession, request: VerificationRequest, organisation: str
    ) -> list[str] | None:
        """What a source or a manifest selects; None for everything."""
        if request.manifest is not None:
            try:
                digest = Digest.parse(request.manifest)
            except ValueError as error:
                raise InvalidRequestError(str(error)) from error
            if not await mirrors.may_read(session, organisation, digest.hex):
                raise NotFoundError(f"manifest {digest}")
            return [str(digest)]
        if request.source is None:
            return None
        return [f"b3:{digest}" for digest in await selectors.of_source(session, organisation, request.source)]

    async def commands_for(self, cluster: str, node: str) -> list[VerifyCommand]:
        """What an agent has not answered yet, with the grants for what it will have to fetch."""
        commands = []
        for row in await self._asking.pending_at(cluster, node):
            command = VerifyCommand.model_validate(row.command)
            if command.repair:
                command.grants = await self.lending.grants(row.organisation, cluster, node, command.manifests)
            commands.append(command)
        return commands

    def is_news(self, cluster: str, node: str, boot_id: str, commands: Sequence[VerifyCommand]) -> bool:
        """Whether the agent shall be told now. It is told again with every answer, until it reports, which may take hours."""
        agent, ids = f"{cluster}/{node} {boot_id}", {command.id for command in commands}
        known = self._told.pop(agent, set())
        if ids:
            self._told[agent] = ids
        return bool(ids - known)

    async def take_report(self, cluster: str, node: str, report: VerifyReport) -> None:
        """An agent's answer."""

        def add(row: VerificationRow) -> None:
            place = {"cluster": cluster, "node": node}
            row.items = [*row.items, *(item.model_copy(update=place).model_dump() for item in report.items)]
            row.chunks_read = added(row.chunks_read, report.chunks_read)
            row.bytes_read = added(row.bytes_read, report.bytes_read)

        await self._asking.answer(report.id, cluster, node, add, report.error)

    async def get(self, verification_id: str, organisation: str, wait_seconds: float = 0) -> Verification:
        """The verification, once it is settled or when the time is over."""
        return _view(await self._asking.get(verification_id, organisation, wait_seconds))

    async def _silent(self, session: ReadSession, row: VerificationRow) -> list[str]:
        """Of those who have not answered, who is not there to answer."""
        if set(row.pending) <= {MIRROR}:
            return []
        now = self.clock()
        alive = {name_of(agent) for agent in await agents.all_agents(session) if is_alive(agent, now)}
        return [name for name in row.pending if name != MIRROR and name not in alive]


def _view(row: VerificationRow) -> Verification:
    return Verification(
        id=row.id,
        status=row.status,  # type: ignore[arg-type] # the column holds nothing else
        created_at=moment(row.created_at),
        completed_at=moment(row.completed_at) if row.completed_at else None,
        request=VerificationRequest.model_validate(row.request),
        items=[DamagedItem.model_validate(item) for item in row.items],
        chunks_read=row.chunks_read,
        bytes_read=row.bytes_read,
        unreachable=row.unreachable,
        error=ErrorBody.model_validate(row.error) if row.error else None,
    )
