"""The HTTP APIs of the mirror and of the agent, one method per route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final
from urllib.parse import quote

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import InternalError
from bdn.core.manifest import MalformedDocumentError, Manifest
from bdn.net.client.service_client import OUTAGE_RETRY, OutageRetry, Params, ServiceClient
from bdn.wire.access_schema import NewToken, SecretBody, SecretEntry, SecretRotation, Token, TokenRequest
from bdn.wire.agent_schema import AgentDocument, Cluster, Heartbeat, HeartbeatReply
from bdn.wire.errors import WrongDocumentError
from bdn.wire.event_schema import EventDocument, Named, NodeEvents
from bdn.wire.layout_form import Layout
from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import HeldManifests, Mirror, Plan
from bdn.wire.operation_schema import (
    Collection,
    CollectionRequest,
    Eviction,
    EvictionRequest,
    PathVerification,
    PathVerificationRequest,
    Prefetch,
    PrefetchRequest,
    RestorationRequest,
    RestoredItem,
    Verification,
    VerificationRequest,
)
from bdn.wire.shapes import Items, Page
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import Cache, StageDocument, StageRequest
from bdn.wire.weights_schema import MirrorRequestBody

_VERIFICATION_WAIT_SECONDS: Final = 30.0


class MirrorClient(ServiceClient):
    """The mirror's API. An agent's data plane answers ``manifest`` and ``layout`` likewise."""

    async def request(self, body: MirrorRequestBody) -> Mirror:
        """``POST /mirror``."""
        return await self._call(Mirror, "POST", "/mirror", body=body)

    async def plan(self, body: MirrorRequestBody) -> Plan:
        """``POST /mirror?dry_run=true``. Listing a large source takes a while."""
        return await self._call(Plan, "POST", "/mirror", body=body, params={"dry_run": "true"}, wait_seconds=600)

    async def mirror(self, mirror_id: str, wait_seconds: float = 0) -> Mirror:
        """``GET /mirror/{id}``."""
        return await self._poll(Mirror, "GET", f"/mirror/{mirror_id}", wait_seconds)

    async def follow(
        self, mirror_id: str, interval_seconds: float = 0.5, outages: OutageRetry = OUTAGE_RETRY
    ) -> AsyncIterator[Mirror]:
        """The mirror again and again, the last time in a terminal state. ``outages`` says how long it may not answer."""
        while True:
            mirror = await outages.ask(partial(self.mirror, mirror_id, interval_seconds))
            yield mirror
            if mirror.status in MIRROR_TERMINAL:
                return

    async def cancel(self, mirror_id: str) -> Mirror:
        """``POST /mirror/{id}/cancel``."""
        return await self._call(Mirror, "POST", f"/mirror/{mirror_id}/cancel")

    async def mirrors(self, params: dict[str, str]) -> Page[Mirror]:
        """``GET /mirror``."""
        return await self._call(Page[Mirror], "GET", "/mirror", params=params)

    async def manifest(self, digest: Digest, bearer: str | None) -> Manifest:
        """The manifest, verified against its name."""
        content = await self._send("GET", f"/manifests/{digest}", bearer=bearer, wait_seconds=60)
        if (actual := digest_of(content)) != digest:
            raise WrongDocumentError(f"manifest {digest}", self.address, f"its content has the name {actual}")
        try:
            return Manifest.parse(content)
        except MalformedDocumentError as error:
            raise InternalError(str(error)) from error

    async def layout(self, digest: Digest, bearer: str | None) -> Layout:
        """Where the manifest's bytes lie: each file's layout is checked against the file's name."""
        content = await self._send("GET", f"/manifests/{digest}/layout", bearer=bearer, wait_seconds=60)
        name = f"the layout of {digest}"
        try:
            layout = await asyncio.to_thread(Layout.parse, content)  # a million files are 300 MB, and seconds
        except MalformedDocumentError as error:
            raise WrongDocumentError(name, self.address, str(error)) from error
        if layout.manifest != digest:
            raise WrongDocumentError(name, self.address, f"it is that of {layout.manifest}")
        return layout

    async def held(self) -> HeldManifests:
        """``GET /manifests``."""
        return await self._call(HeldManifests, "GET", "/manifests")

    async def evict(self, request: EvictionRequest, wait_seconds: float = 0) -> Eviction:
        """``POST /evictions``."""
        return await self._poll(Eviction, "POST", "/evictions", wait_seconds, body=request)

    async def eviction(self, eviction_id: str, wait_seconds: float = 0) -> Eviction:
        """``GET /evictions/{id}``."""
        return await self._poll(Eviction, "GET", f"/evictions/{eviction_id}", wait_seconds)

    async def prefetch(self, request: PrefetchRequest, wait_seconds: float = 0) -> Prefetch:
        """``POST /prefetches``."""
        return await self._poll(Prefetch, "POST", "/prefetches", wait_seconds, body=request)

    async def prefetch_by_id(self, prefetch_id: str, wait_seconds: float = 0) -> Prefetch:
        """``GET /prefetches/{id}``."""
        return await self._poll(Prefetch, "GET", f"/prefetches/{prefetch_id}", wait_seconds)

    async def agents(self) -> Items[AgentDocument]:
        """``GET /agents``."""
        return await self._call(Items[AgentDocument], "GET", "/agents")

    async def clusters(self) -> Items[Cluster]:
        """``GET /clusters``."""
        return await self._call(Items[Cluster], "GET", "/clusters")

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """``POST /agents/heartbeat``; the mirror may keep it open for ``heartbeat.wait_seconds``."""
        return await self._call(
            HeartbeatReply, "POST", "/agents/heartbeat", body=heartbeat, wait_seconds=heartbeat.wait_seconds
        )

    async def named(self, of: str) -> Named:
        """``GET /names``."""
        return await self._call(Named, "GET", "/names", params={"of": of})

    async def events(self, params: Params) -> Page[EventDocument]:
        """``GET /events``."""
        return await self._call(Page[EventDocument], "GET", "/events", params=params)

    async def set_secret(self, name: str, body: SecretBody) -> SecretEntry:
        """``PUT /secrets/{name}``."""
        return await self._call(SecretEntry, "PUT", f"/secrets/{quote(name, safe='')}", body=body)

    async def secrets(self) -> Items[SecretEntry]:
        """``GET /secrets``."""
        return await self._call(Items[SecretEntry], "GET", "/secrets")

    async def rotate_secrets(self) -> SecretRotation:
        """``POST /secrets/rotate``."""
        return await self._call(SecretRotation, "POST", "/secrets/rotate")

    async def remove_secret(self, name: str) -> None:
        """``DELETE /secrets/{name}``."""
        await self._send("DELETE", f"/secrets/{quote(name, safe='')}")

    async def create_token(self, request: TokenRequest) -> NewToken:
        """``POST /tokens``."""
        return await self._call(NewToken, "POST", "/tokens", body=request)

    async def tokens(self) -> Items[Token]:
        """``GET /tokens``."""
        return await self._call(Items[Token], "GET", "/tokens")

    async def revoke_token(self, token_id: str) -> Token:
        """``DELETE /tokens/{id}``."""
        return await self._call(Token, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    async def verify(self, request: VerificationRequest) -> Verification:
        """``POST /verifications``."""
        return await self._call(Verification, "POST", "/verifications", body=request)

    async def verification(self, verification_id: str) -> Verification:
        """``GET /verifications/{id}``, once it has ended or after a while."""
        path = f"/verifications/{quote(verification_id, safe='')}"
        return await self._poll(Verification, "GET", path, _VERIFICATION_WAIT_SECONDS)

    async def collect(self, request: CollectionRequest) -> Collection:
        """``POST /collections``."""
        return await self._call(Collection, "POST", "/collections", body=request)

    async def collection(self, collection_id: str, wait_seconds: float) -> Collection:
        """``GET /collections/{id}``."""
        return await self._poll(Collection, "GET", f"/collections/{collection_id}", wait_seconds)

    async def restore(self, request: RestorationRequest) -> Items[RestoredItem]:
        """``POST /restorations``."""
        return await self._call(Items[RestoredItem], "POST", "/restorations", body=request)


class AgentClient(ServiceClient):
    """The agent's control API."""

    async def stage(self, request: StageRequest) -> StageDocument:
        """``POST /stages``; with ``request.wait`` the answer comes when the stage is terminal."""
        return await self._call(
            StageDocument, "POST", "/stages", body=request, wait_seconds=86400 if request.wait else 0
        )

    async def stage_by_id(self, stage_id: str, wait_seconds: float = 0) -> StageDocument:
        """``GET /stages/{id}``."""
        return await self._poll(StageDocument, "GET", f"/stages/{stage_id}", wait_seconds)

    async def follow(
        self, stage_id: str, interval_seconds: float = 0.5, outages: OutageRetry = OUTAGE_RETRY
    ) -> AsyncIterator[StageDocument]:
        """The stage again and again, the last time in a terminal state. ``outages`` says how long it may not answer."""
        while True:
            stage = await outages.ask(partial(self.stage_by_id, stage_id, interval_seconds))
            yield stage
            if stage.state in STAGE_TERMINAL:
                return

    async def stages(self) -> Items[StageDocument]:
        """``GET /stages``."""
        return await self._call(Items[StageDocument], "GET", "/stages")

    async def unstage(self, stage_id: str) -> StageDocument:
        """``DELETE /stages/{id}``."""
        return await self._call(StageDocument, "DELETE", f"/stages/{stage_id}", wait_seconds=60)

    async def verify(self, request: PathVerificationRequest) -> PathVerification:
        """``POST /verifications``; the answer comes when all of it has been read, however long that takes."""
        return await self._call(PathVerification, "POST", "/verifications", body=request, wait_seconds=7 * 24 * 3600)

    async def events(self, params: Params) -> NodeEvents:
        """``GET /events``."""
        return await self._call(NodeEvents, "GET", "/events", params=params)

    async def cache(self) -> Cache:
        """``GET /cache``."""
        return await self._call(Cache, "GET", "/cache")
