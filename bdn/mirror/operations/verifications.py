"""VerificationService across tiers: agents read their caches and report, the keeper reads the store."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError
from bdn.mirror.damages import DAMAGE
from bdn.mirror.db import agents, mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import OperationRow
from bdn.mirror.operations.operations import VERIFICATION, Operations, OperationState, asks_mirror
from bdn.mirror.waiting import Watch
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.operation_schema import DamagedItem, Verification, VerificationRequest, VerifyCommand
from bdn.wire.shapes import added

_GRANTED_AT_ONCE: Final = 256  # manifests of one grant, which has to fit into the head of a request


@dataclass(frozen=True)
class VerificationService:
    """The service behind ``/verifications``."""

    database: Database
    operations: Operations
    watch: Watch
    signer: GrantSigner
    grant_seconds: int

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
            found = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            if request.manifest is not None and not await mirrors.may_read(session, organisation, found[0]):
                raise NotFoundError(f"manifest {request.manifest}")
        return [f"b3:{digest}" for digest in found]

    async def command(self, row: OperationRow, cluster: str, node: str) -> VerifyCommand:
        """What an agent is told, with the grants for what it will have to fetch."""
        command = VerifyCommand.model_validate(row.command)
        if command.repair:
            command.grants = await self._grants(row.organisation or "", cluster, node, command.manifests)
        return command

    async def _grants(self, organisation: str, cluster: str, node: str, manifests: Sequence[str] | None) -> list[str]:
        """For what the node holds of these manifests (None: of any) and was ever mirrored for the organisation.

        Made anew for each answer: the grants of stages end after a day, and what a node holds stays for months. Also for
        what the organisation gave up: the node holds that all the same, and other agents may have the right bytes.
        """
        async with self.database.read() as session:
            held = await agents.manifests_on(session, cluster, node)
            wanted = [name.removeprefix("b3:") for name in sorted(held if manifests is None else held & set(manifests))]
            sources = await mirrors.sources_by_manifest(session, organisation, wanted)
        mounts = [
            GrantedMount(f"/{number}", Digest(name), sources[name][0])
            for number, name in enumerate(wanted)
            if name in sources
        ]
        ends = time.time() + self.grant_seconds
        return [
            self.signer.sign(Grant(organisation, tuple(mounts[start : start + _GRANTED_AT_ONCE]), ends))
            for start in range(0, len(mounts), _GRANTED_AT_ONCE)
        ]

    async def get(self, verification_id: str, organisation: str, wait_seconds: float = 0) -> Verification:
        """The verification, once it is over or when the time is."""
        return _document(await self.operations.get(VERIFICATION, verification_id, organisation, wait_seconds))


def _document(operation: OperationState) -> Verification:
    items: list[DamagedItem] = []
    chunks_read = bytes_read = 0
    for part in operation.parts:
        place = {"cluster": part.cluster, "node": part.node} if part.cluster else {}
        items += [DamagedItem.model_validate(item | place) for item in part.result.get("items", [])]
        chunks_read = added(chunks_read, part.result.get("chunks_read", 0))
        bytes_read = added(bytes_read, part.result.get("bytes_read", 0))
    return Verification(**operation.document(), items=items, chunks_read=chunks_read, bytes_read=bytes_read)
