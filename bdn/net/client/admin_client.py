"""What ``bdn-admin`` asks of the mirror beside what other programs ask."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from bdn.net.client.mirror_client import MirrorClient
from bdn.net.client.service_client import Params
from bdn.wire.collection_schema import Collection, CollectionRequest, Restoration, RestorationRequest
from bdn.wire.event_schema import EventPage, Named
from bdn.wire.secret_schema import SecretBody, SecretEntries, SecretEntry, SecretRotation
from bdn.wire.token_schema import NewToken, Token, TokenRequest, Tokens
from bdn.wire.verification_schema import Verification, VerificationRequest

_WAIT_SECONDS: Final = 30.0


class AdminClient(MirrorClient):
    """The mirror's API, with secrets, tokens, verifications, collections and events."""

    async def named(self, of: str) -> Named:
        """``GET /names``."""
        return await self._call(Named, "GET", "/names", params={"of": of})

    async def events(self, params: Params) -> EventPage:
        """``GET /events``."""
        return await self._call(EventPage, "GET", "/events", params=params)

    async def set_secret(self, name: str, body: SecretBody) -> SecretEntry:
        """``PUT /secrets/{name}``."""
        return await self._call(SecretEntry, "PUT", f"/secrets/{quote(name, safe='')}", body=body)

    async def secrets(self) -> SecretEntries:
        """``GET /secrets``."""
        return await self._call(SecretEntries, "GET", "/secrets")

    async def rotate_secrets(self) -> SecretRotation:
        """``POST /secrets/rotate``."""
        return await self._call(SecretRotation, "POST", "/secrets/rotate")

    async def remove_secret(self, name: str) -> None:
        """``DELETE /secrets/{name}``."""
        await self._send("DELETE", f"/secrets/{quote(name, safe='')}")

    async def create_token(self, request: TokenRequest) -> NewToken:
        """``POST /tokens``."""
        return await self._call(NewToken, "POST", "/tokens", body=request)

    async def tokens(self) -> Tokens:
        """``GET /tokens``."""
        return await self._call(Tokens, "GET", "/tokens")

    async def revoke_token(self, token_id: str) -> Token:
        """``DELETE /tokens/{id}``."""
        return await self._call(Token, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    async def verify(self, request: VerificationRequest) -> Verification:
        """``POST /verifications``."""
        return await self._call(Verification, "POST", "/verifications", body=request)

    async def verification(self, verification_id: str) -> Verification:
        """``GET /verifications/{id}``, once it has ended or after a while."""
        path, wait = f"/verifications/{quote(verification_id, safe='')}", {"wait": str(_WAIT_SECONDS)}
        return await self._call(Verification, "GET", path, params=wait, wait_seconds=_WAIT_SECONDS)

    async def collect(self, request: CollectionRequest) -> Collection:
        """``POST /collections``."""
        return await self._call(Collection, "POST", "/collections", body=request)

    async def collection(self, collection_id: str, wait_seconds: float) -> Collection:
        """``GET /collections/{id}``."""
        path, params = f"/collections/{collection_id}", {"wait": str(wait_seconds)}
        return await self._call(Collection, "GET", path, params=params, wait_seconds=wait_seconds)

    async def restore(self, request: RestorationRequest) -> Restoration:
        """``POST /restorations``."""
        return await self._call(Restoration, "POST", "/restorations", body=request)
