"""``/tokens``: made, listed and revoked by operators."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path

from bdn.mirror.access.tokens import TokenTable
from bdn.mirror.api.callers import Operator
from bdn.wire.token_schema import NewToken, Token, TokenRequest, Tokens

logger = logging.getLogger(__name__)

TokenId = Annotated[str, Path(pattern=r"^tok_[0-9a-f]{24}$")]


def build_tokens_router(table: TokenTable) -> APIRouter:
    """The routes for any such table."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokens", status_code=201, summary="Make a token; it is shown once")
    async def create(body: TokenRequest, _: Operator) -> NewToken:
        body.check()
        made = await table.create(body)
        logger.info("token made", extra={"token_id": made.id, "organisation": made.organisation, "role": made.role})
        return made

    @router.get("/tokens", summary="All tokens, of all organisations, without themselves")
    async def listed(_: Operator) -> Tokens:
        return Tokens(items=await table.all())

    @router.delete("/tokens/{token_id}", summary="Revoke a token: it is good for nothing from now on")
    async def revoke(token_id: TokenId, _: Operator) -> Token:
        revoked = await table.revoke(token_id)
        logger.info("token revoked", extra={"token_id": revoked.id, "organisation": revoked.organisation})
        return revoked

    return router
