"""``/verifications``: what is held is read again, and repaired."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from bdn.mirror.access.access import check_may_verify
from bdn.mirror.api.callers import Controller
from bdn.mirror.api.mirrors import WaitSeconds
from bdn.mirror.operations.verifications import Verifications
from bdn.wire.verification_schema import Verification, VerificationRequest

VerificationId = Annotated[str, Path(pattern=r"^ver_[0-9a-f]{24}$")]


def build_verifications_router(verifications: Verifications) -> APIRouter:
    """The routes for any such service."""
    router = APIRouter(prefix="/verifications", tags=["control"])

    @router.post("", status_code=202, summary="Read what is held again, and repair what is wrong")
    async def verify(body: VerificationRequest, caller: Controller, wait: WaitSeconds = 0) -> Verification:
        check_may_verify(caller, body)
        return await verifications.start(body, caller.organisation, wait)

    @router.get("/{verification_id}", summary="A recorded verification")
    async def verification(verification_id: VerificationId, caller: Controller, wait: WaitSeconds = 0) -> Verification:
        return await verifications.get(verification_id, caller.organisation, wait)

    return router
