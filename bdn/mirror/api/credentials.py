"""``/secrets`` (values only go in), ``/tokens`` (for operators), and ``/.well-known`` (public, as OpenID Connect asks)."""

import logging
from typing import Annotated, Final

from fastapi import Depends, Path, Request, Response

from bdn.core.errors import NotFoundError
from bdn.mirror.api.parameters import Controller, Operator, Organisation
from bdn.mirror.db.tokens import TokenTable
from bdn.mirror.upstream.issuer import DISCOVERY_PATH, JWKS_PATH, IdentityIssuer, Jwk
from bdn.mirror.upstream.sign_ins import Secrets
from bdn.net.api_server import new_router, provided
from bdn.wire.access_schema import (
    NAME_PATTERN,
    NewToken,
    Role,
    SecretBody,
    SecretEntry,
    SecretRotation,
    Token,
    TokenRequest,
)
from bdn.wire.shapes import Items, moment

logger = logging.getLogger(__name__)

# An hour: a key that was added is known everywhere an hour later, at the latest, and may sign from then on.
_CACHEABLE: Final = {"Cache-Control": "public, max-age=3600"}


async def _issuer(request: Request) -> IdentityIssuer:
    found: IdentityIssuer | None = request.app.state.provided.get(IdentityIssuer)
    if found is None:
        raise NotFoundError("an OpenID issuer (the operator sets BDN_ISSUER_URL)")
    return found


SecretName = Annotated[str, Path(pattern=f"^{NAME_PATTERN}$")]
TokenId = Annotated[str, Path(pattern=r"^tok_[0-9a-f]{24}$")]
_Secrets = Annotated[Secrets, provided(Secrets)]
_Tokens = Annotated[TokenTable, provided(TokenTable)]
_Issuer = Annotated[IdentityIssuer, Depends(_issuer)]

secrets_router = new_router("secrets")
tokens_router = new_router("tokens")
identity_router = new_router("identity")


@secrets_router.get("/secrets", summary="Secrets: names and dates, never values")
async def list_secrets(secrets: _Secrets, caller: Controller) -> Items[SecretEntry]:
    return await _entries(secrets, caller.organisation)


@secrets_router.put("/secrets/{name}", summary="Keep a secret, or give it a new value")
async def put_secret(secrets: _Secrets, name: SecretName, body: SecretBody, caller: Controller) -> SecretEntry:
    organisation = caller.organisation
    body.check()
    await secrets.table.set(organisation, name, body.value)
    logger.info("secret set", extra={"secret": name, "organisation": organisation})
    entry = next((entry for entry in (await _entries(secrets, organisation)).items if entry.name == name), None)
    if entry is None:  # somebody removed it at this very moment
        raise NotFoundError(f"secret {name!r}")
    return entry


@secrets_router.post("/secrets/rotate", summary="Encrypt secrets with the first key of BDN_SECRETS_KEY")
async def rotate_secrets(secrets: _Secrets, caller: Controller, named: Organisation = None) -> SecretRotation:
    """Those of all organisations, where an operator asks who names none; otherwise the organisation's own."""
    organisation = caller.organisation
    is_for_all = caller.role is Role.OPERATOR and named is None
    await secrets.table.rotate(organisation)
    left = await secrets.table.rotate_others(organisation) if is_for_all else None
    logger.info("secrets rotated", extra={"organisation": "all" if is_for_all else organisation})
    return SecretRotation(items=(await _entries(secrets, organisation)).items, others_left=left)


@secrets_router.delete("/secrets/{name}", status_code=204, summary="Forget a secret")
async def remove_secret(secrets: _Secrets, name: SecretName, caller: Controller) -> None:
    organisation = caller.organisation
    await secrets.table.remove(organisation, name)
    logger.info("secret removed", extra={"secret": name, "organisation": organisation})


async def _entries(secrets: Secrets, organisation: str) -> Items[SecretEntry]:
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
    return Items[SecretEntry](items=items)


@tokens_router.post("/tokens", status_code=201, summary="Make a token; it is shown once")
async def create_token(table: _Tokens, body: TokenRequest, _: Operator) -> NewToken:
    body.check()
    made = await table.create(body)
    logger.info("token made", extra={"token_id": made.id, "organisation": made.organisation, "role": made.role})
    return made


@tokens_router.get("/tokens", summary="All tokens, of all organisations, without themselves")
async def list_tokens(table: _Tokens, _: Operator) -> Items[Token]:
    return Items[Token](items=await table.all())


@tokens_router.delete("/tokens/{token_id}", summary="Revoke a token: it is good for nothing from now on")
async def revoke_token(table: _Tokens, token_id: TokenId, _: Operator) -> Token:
    revoked = await table.revoke(token_id)
    logger.info("token revoked", extra={"token_id": revoked.id, "organisation": revoked.organisation})
    return revoked


@identity_router.get(DISCOVERY_PATH, summary="OpenID Connect discovery of this mirror's identity tokens")
async def discovery(issuer: _Issuer, response: Response) -> dict[str, str | list[str]]:
    document = issuer.discovery()
    response.headers.update(_CACHEABLE)
    return document


@identity_router.get(JWKS_PATH, summary="The public keys of this mirror's identity tokens")
async def jwks(issuer: _Issuer, response: Response) -> dict[str, list[Jwk]]:
    document = issuer.jwks()
    response.headers.update(_CACHEABLE)
    return document
