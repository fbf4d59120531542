"""``/.well-known``: what clouds read to check this mirror's identity tokens. Public, as OpenID Connect asks."""

from __future__ import annotations

from fastapi import APIRouter, Response

from bdn.core.errors import NotFoundError
from bdn.mirror.upstream.issuer import DISCOVERY_PATH, JWKS_PATH, IdentityIssuer, Jwk

# An hour: a key that was added is known everywhere an hour later, at the latest, and may sign from then on.
_CACHEABLE = {"Cache-Control": "public, max-age=3600"}


def build_identity_router(issuer: IdentityIssuer | None) -> APIRouter:
    """The two documents; without an issuer they are not there, and the answer says what would make them appear."""
    router = APIRouter(tags=["identity"])

    def present() -> IdentityIssuer:
        if issuer is None:
            raise NotFoundError("an OpenID issuer (the operator sets BDN_ISSUER_URL)")
        return issuer

    @router.get(DISCOVERY_PATH, summary="OpenID Connect discovery of this mirror's identity tokens")
    async def discovery(response: Response) -> dict[str, str | list[str]]:
        document = present().discovery()
        response.headers.update(_CACHEABLE)
        return document

    @router.get(JWKS_PATH, summary="The public keys of this mirror's identity tokens")
    async def jwks(response: Response) -> dict[str, list[Jwk]]:
        document = present().jwks()
        response.headers.update(_CACHEABLE)
        return document

    return router
