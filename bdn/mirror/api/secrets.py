"""``/secrets``: names and dates come out, values only go in."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path

from bdn.core.caller import Role
from bdn.core.errors import NotFoundError
from bdn.mirror.api.callers import Controller, Organisation
from bdn.mirror.upstream.secrets import Secrets
from bdn.wire.quantities import moment
from bdn.wire.secret_schema import NAME_PATTERN, SecretBody, SecretEntries, SecretEntry, SecretRotation

logger = logging.getLogger(__name__)

SecretName = Annotated[str, Path(pattern=f"^{NAME_PATTERN}$")]


def build_secrets_router(secrets: Secrets) -> APIRouter:
    """The encrypted table; the operator's own secrets (environment, directory) are not shown."""
    router = APIRouter(tags=["secrets"])

    async def entries(organisation: str) -> SecretEntries:
        items = [
            SecretEntry(
                name=row.name,
                created_at=moment(row.created_at),
                updated_at=moment(row.updated_at),
                sealed_with=secrets.table.keyring.sealed_with(row.ciphertext),
                outranked=await secrets.is_outranked(row.name),
            )
            for row in await secrets.table.rows(organisation)
        ]
        return SecretEntries(items=items)

    @router.get("/secrets", summary="Secrets: names and dates, never values")
    async def listed(caller: Controller) -> SecretEntries:
        return await entries(caller.organisation)

    @router.put("/secrets/{name}", summary="Keep a secret, or give it a new value")
    async def put(name: SecretName, body: SecretBody, caller: Controller) -> SecretEntry:
        organisation = caller.organisation
        body.check()
        await secrets.table.set(organisation, name, body.value)
        logger.info("secret set", extra={"secret": name, "organisation": organisation})
        entry = next((entry for entry in (await entries(organisation)).items if entry.name == name), None)
        if entry is None:  # somebody removed it at this very moment
            raise NotFoundError(f"secret {name!r}")
        return entry

    @router.post("/secrets/rotate", summary="Encrypt secrets with the first key of BDN_SECRETS_KEY")
    async def rotate(caller: Controller, named: Organisation = None) -> SecretRotation:
        """Those of all organisations, where an operator asks who names none; otherwise the organisation's own."""
        organisation = caller.organisation
        is_for_all = caller.role is Role.OPERATOR and named is None
        await secrets.table.rotate(organisation)
        left = await secrets.table.rotate_others(organisation) if is_for_all else None
        logger.info("secrets rotated", extra={"organisation": "all" if is_for_all else organisation})
        return SecretRotation(items=(await entries(organisation)).items, others_left=left)

    @router.delete("/secrets/{name}", status_code=204, summary="Forget a secret")
    async def remove(name: SecretName, caller: Controller) -> None:
        organisation = caller.organisation
        await secrets.table.remove(organisation, name)
        logger.info("secret removed", extra={"secret": name, "organisation": organisation})

    return router
