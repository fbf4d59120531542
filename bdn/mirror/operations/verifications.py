"""Verifications across tiers: agents read their caches and report, the keeper reads the store."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.errors import NotFoundError
from bdn.mirror.access import selectors
from bdn.mirror.damages import DAMAGE
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import OperationRow
from bdn.mirror.operations.operations import VERIFICATION, Operation, Operations, asks_mirror
from bdn.mirror.scrub.repair_grants import Lending
from bdn.mirror.watch import Watch
from bdn.wire.operation_schema import (
    DamagedItem,
    Verification,
    VerificationRequest,
    VerifyCommand,
)
from bdn.wire.shapes import added


@dataclass(frozen=True)
class Verifications:
    """The service behind ``/verifications``."""

    database: Database
    operations: Operations
    lending: Lending
    watch: Watch

    async def start(self, request: VerificationRequest, organisation: str, wait_seconds: float = 0) -> Verification:
        """Record it and tell those who shall read.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: no such source or manifest was mirrored, or no agent of that name was ever heard of.
        """
        request.check()
        manifests = None if request.all else await self._manifests(request, organisation)

        def command(verification_id: str) -> VerifyCommand:
            return VerifyCommand(
                id=verification_id, tier=request.tier, manifests=manifests, all=request.all, repair=request.repair
            )

        verification_id = await self.operations.begin(
            VERIFICATION,
            request,
            lambda new_id: command(new_id).model_dump(),
            organisation=organisation,
            agents=await self.operations.agents_asked(request),
            mirror=asks_mirror(request),
        )
        self.watch.notify(DAMAGE)
        return await self.get(verification_id, organisation, wait_seconds)

    async def _manifests(self, request: VerificationRequest, organisation: str) -> list[str]:
        async with self.database.read() as session:
            found = await selectors.named(session, organisation, request.manifest, request.source)
            if request.manifest is not None and not await mirrors.may_read(session, organisation, found[0]):
                raise NotFoundError(f"manifest {request.manifest}")
        return [f"b3:{digest}" for digest in found]

    async def command(self, row: OperationRow, cluster: str, node: str) -> VerifyCommand:
        """What an agent is told, with the grants for what it will have to fetch."""
        command = VerifyCommand.model_validate(row.command)
        if command.repair:
            command.grants = await self.lending.grants(row.organisation or "", cluster, node, command.manifests)
        return command

    async def get(self, verification_id: str, organisation: str, wait_seconds: float = 0) -> Verification:
        """The verification, once it is over or when the time is."""
        return _document(await self.operations.get(VERIFICATION, verification_id, organisation, wait_seconds))


def _document(operation: Operation) -> Verification:
    items: list[DamagedItem] = []
    chunks_read = bytes_read = 0
    for part in operation.parts:
        place = {"cluster": part.cluster, "node": part.node} if part.cluster else {}
        items += [DamagedItem.model_validate(item | place) for item in part.result.get("items", [])]
        chunks_read = added(chunks_read, part.result.get("chunks_read", 0))
        bytes_read = added(bytes_read, part.result.get("bytes_read", 0))
    return Verification(**operation.document(), items=items, chunks_read=chunks_read, bytes_read=bytes_read)
