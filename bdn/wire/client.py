"""The client side of both control planes: small JSON documents, over TCP or a unix socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import BdnError, ChecksumMismatchError, InternalError, ServiceError
from bdn.core.manifest import MalformedDocumentError, Manifest
from bdn.wire.agent_schema import Agents, Clusters, Heartbeat, HeartbeatReply
from bdn.wire.errors import error_from
from bdn.wire.eviction_schema import Eviction, EvictionRequest
from bdn.wire.layout_form import Layout
from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import HeldManifests, Mirror, MirrorPage, Plan
from bdn.wire.prefetch_schema import Prefetch, PrefetchRequest
from bdn.wire.secret_schema import SecretBody, SecretEntries, SecretEntry
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import Cache, Stage, StageRequest, Stages
from bdn.wire.weights_schema import MirrorRequestBody

LONGEST_WAIT_SECONDS = 60.0
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(eq=False)
class ServiceUnreachableError(ServiceError):
    """No answer at all from one of our services."""

    code = "STORE_UNAVAILABLE"
    transient = True
    address: str
    reason: str

    def __str__(self) -> str:
        return f"no answer from {self.address} ({self.reason}); is the service running there?"


class _Handshake:
    """Closes the connection of a request that is canceled in its TLS handshake: httpcore leaves it to nobody, and open."""

    def __init__(self) -> None:
        self._connection: Any = None

    async def __call__(self, event: str, facts: dict[str, Any]) -> None:
        """Told by the ``trace`` extension of httpcore."""
        if event == "connection.connect_tcp.complete":
            self._connection = facts["return_value"]
        elif event == "connection.start_tls.failed":
            await self._connection.aclose()


class ServiceClient:
    """Requests to one service. ``address`` is a URL, or ``unix:/path/to/socket``. Close it, or use it as a context."""

    def __init__(self, address: str, bearer: str | None = None, *, timeout_seconds: float = 30.0) -> None:
        self.address = address
        socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        self.base_url = "http://agent" if socket else address.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            transport=httpx2.AsyncHTTPTransport(uds=socket) if socket else None,
            headers={"Authorization": f"Bearer {bearer}"} if bearer else {},
            timeout=timeout_seconds,
            # The authorities that byte threads believe, and SSL_CERT_FILE names. They take 20 ms to load.
            verify=ssl.create_default_context() if address.startswith("https:") else False,
            trust_env=not socket and urlsplit(address).hostname not in ("127.0.0.1", "::1", "localhost"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ready(self) -> bool:
        """Whether the service answers and can work."""
        try:
            await self._send("GET", "/readyz")
        except BdnError:
            return False
        return True

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: dict[str, str] | None = None,
        bearer: str | None = None,
        wait_seconds: float = 0,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = body.model_dump_json() if body is not None else None
        try:
            response = await self._http.request(
                method,
                path,
                content=content,
                params=params,
                headers=headers,
                timeout=self._timeout_seconds + wait_seconds,
                extensions={"trace": _Handshake()},
            )
        except httpx2.TransportError as error:
            raise ServiceUnreachableError(self.address, str(error) or type(error).__name__) from error
        if not response.is_success:
            raise error_from(response.status_code, response.content)
        return response.content

    async def _call(
        self,
        kind: type[_Body],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: dict[str, str] | None = None,
        wait_seconds: float = 0,
    ) -> _Body:
        content = await self._send(method, path, body=body, params=params, wait_seconds=wait_seconds)
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise InternalError(f"{self.address}{path} answered something else than a {kind.__name__}") from error


def _wait(seconds: float) -> dict[str, str]:
    return {"wait": str(max(0.0, min(LONGEST_WAIT_SECONDS, seconds)))}


class MirrorClient(ServiceClient):
    """The mirror's API."""

    async def request(self, body: MirrorRequestBody) -> Mirror:
        """``POST /mirror``."""
        return await self._call(Mirror, "POST", "/mirror", body=body)

    async def plan(self, body: MirrorRequestBody) -> Plan:
        """``POST /mirror?dry_run=true``. Listing a large source takes a while."""
        return await self._call(Plan, "POST", "/mirror", body=body, params={"dry_run": "true"}, wait_seconds=600)

    async def mirror(self, mirror_id: str, wait_seconds: float = 0) -> Mirror:
        """``GET /mirror/{id}``."""
        return await self._call(
            Mirror, "GET", f"/mirror/{mirror_id}", params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def follow(self, mirror_id: str, interval_seconds: float = 0.5) -> AsyncIterator[Mirror]:
        """The mirror again and again, the last time in a terminal state."""
        while True:
            mirror = await self.mirror(mirror_id, interval_seconds)
            yield mirror
            if mirror.status in MIRROR_TERMINAL:
                return

    async def cancel(self, mirror_id: str) -> Mirror:
        """``POST /mirror/{id}/cancel``."""
        return await self._call(Mirror, "POST", f"/mirror/{mirror_id}/cancel")

    async def mirrors(self, params: dict[str, str]) -> MirrorPage:
        """``GET /mirror``."""
        return await self._call(MirrorPage, "GET", "/mirror", params=params)

    async def manifest(self, digest: Digest, bearer: str | None) -> Manifest:
        """The manifest, verified against its name."""
        content = await self._send("GET", f"/manifests/{digest}", bearer=bearer, wait_seconds=60)
        if (actual := digest_of(content)) != digest:
            raise ChecksumMismatchError(f"manifest {digest}", str(digest), str(actual))
        try:
            return Manifest.parse(content)
        except MalformedDocumentError as error:
            raise InternalError(str(error)) from error

    async def layout(self, digest: Digest, bearer: str | None) -> Layout:
        """Where the manifest's bytes lie: each file's layout is checked against the file's name."""
        content = await self._send("GET", f"/manifests/{digest}/layout", bearer=bearer, wait_seconds=60)
        try:
            return await asyncio.to_thread(Layout.parse, content)  # a million files are 300 MB, and seconds
        except MalformedDocumentError as error:
            raise InternalError(f"the layout of {digest} is wrong: {error}") from error

    async def held(self) -> HeldManifests:
        """``GET /manifests``."""
        return await self._call(HeldManifests, "GET", "/manifests")

    async def evict(self, request: EvictionRequest, wait_seconds: float = 0) -> Eviction:
        """``POST /evictions``."""
        return await self._call(
            Eviction, "POST", "/evictions", body=request, params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def eviction(self, eviction_id: str, wait_seconds: float = 0) -> Eviction:
        """``GET /evictions/{id}``."""
        return await self._call(
            Eviction, "GET", f"/evictions/{eviction_id}", params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def prefetch(self, request: PrefetchRequest, wait_seconds: float = 0) -> Prefetch:
        """``POST /prefetches``."""
        return await self._call(
            Prefetch, "POST", "/prefetches", body=request, params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def prefetch_by_id(self, prefetch_id: str, wait_seconds: float = 0) -> Prefetch:
        """``GET /prefetches/{id}``."""
        return await self._call(
            Prefetch, "GET", f"/prefetches/{prefetch_id}", params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def agents(self) -> Agents:
        """``GET /agents``."""
        return await self._call(Agents, "GET", "/agents")

    async def clusters(self) -> Clusters:
        """``GET /clusters``."""
        return await self._call(Clusters, "GET", "/clusters")

    async def set_secret(self, name: str, body: SecretBody) -> SecretEntry:
        """``PUT /secrets/{name}``."""
        return await self._call(SecretEntry, "PUT", f"/secrets/{quote(name, safe='')}", body=body)

    async def secrets(self) -> SecretEntries:
        """``GET /secrets``."""
        return await self._call(SecretEntries, "GET", "/secrets")

    async def rotate_secrets(self) -> SecretEntries:
        """``POST /secrets/rotate``."""
        return await self._call(SecretEntries, "POST", "/secrets/rotate")

    async def remove_secret(self, name: str) -> None:
        """``DELETE /secrets/{name}``."""
        await self._send("DELETE", f"/secrets/{quote(name, safe='')}")

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """``POST /agents/heartbeat``; the mirror may keep it open for ``heartbeat.wait_seconds``."""
        return await self._call(
            HeartbeatReply, "POST", "/agents/heartbeat", body=heartbeat, wait_seconds=heartbeat.wait_seconds
        )


class AgentClient(ServiceClient):
    """The agent's control API."""

    async def stage(self, request: StageRequest) -> Stage:
        """``POST /stages``; with ``request.wait`` the answer comes when the stage is terminal."""
        return await self._call(Stage, "POST", "/stages", body=request, wait_seconds=86400 if request.wait else 0)

    async def stage_by_id(self, stage_id: str, wait_seconds: float = 0) -> Stage:
        """``GET /stages/{id}``."""
        return await self._call(
            Stage, "GET", f"/stages/{stage_id}", params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def follow(self, stage_id: str, interval_seconds: float = 0.5) -> AsyncIterator[Stage]:
        """The stage again and again, the last time in a terminal state."""
        while True:
            stage = await self.stage_by_id(stage_id, interval_seconds)
            yield stage
            if stage.state in STAGE_TERMINAL:
                return

    async def stages(self) -> Stages:
        """``GET /stages``."""
        return await self._call(Stages, "GET", "/stages")

    async def unstage(self, stage_id: str) -> Stage:
        """``DELETE /stages/{id}``."""
        return await self._call(Stage, "DELETE", f"/stages/{stage_id}", wait_seconds=60)

    async def cache(self) -> Cache:
        """``GET /cache``."""
        return await self._call(Cache, "GET", "/cache")
