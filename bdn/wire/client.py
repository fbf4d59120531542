"""The client side of both control planes: small JSON documents, over TCP or a unix socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from bdn.core.digest import Digest, digest_of
from bdn.core.errors import BdnError, InternalError, InvalidRequestError, StoreUnavailableError
from bdn.core.manifest import MalformedDocumentError, Manifest
from bdn.wire.agent_schema import Agents, Clusters, Heartbeat, HeartbeatReply
from bdn.wire.errors import error_from
from bdn.wire.event_schema import NodeEvents
from bdn.wire.eviction_schema import Eviction, EvictionRequest
from bdn.wire.handshakes import Handshake
from bdn.wire.layout_form import Layout
from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import HeldManifests, Mirror, MirrorPage, Plan
from bdn.wire.paths import ORGANISATION_HEADER
from bdn.wire.persistence import PERSISTENT, Persistence
from bdn.wire.prefetch_schema import Prefetch, PrefetchRequest
from bdn.wire.service_failures import ServiceUnreachableError, WrongDocumentError
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import Cache, Stage, StageRequest, Stages
from bdn.wire.verification_schema import PathVerificationRequest, VerifyReport
from bdn.wire.weights_schema import MirrorRequestBody

LONGEST_WAIT_SECONDS = 60.0
_CONNECT_SECONDS = 5.0  # a host that is gone does not say so
# h11 would take what is left of one answer, such as its repetition, for the answer to the connection's next request.
_ONE_REQUEST_EACH = httpx2.Limits(max_keepalive_connections=0)
_Body = TypeVar("_Body", bound=BaseModel)
Params = Mapping[str, str | list[str]]


class ServiceClient:
    """Requests to one service. ``address`` is a URL, or ``unix:/path/to/socket``. Close it, or use it as a context.

    A request takes ``timeout_seconds`` at most, and as long again as it asks the service to wait: also when bytes trickle.
    ``organisation`` is whom an operator acts for; None means its own. An answer of more than ``most_bytes``, unpacked, is not
    read to its end; None is for services that are trusted with this program's memory.
    """

    def __init__(
        self,
        address: str,
        bearer: str | None = None,
        *,
        organisation: str | None = None,
        timeout_seconds: float = 30.0,
        most_bytes: int | None = None,
    ) -> None:
        self.address = address
        self._most_bytes = most_bytes
        socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        self.base_url = "http://agent" if socket else address.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=_ONE_REQUEST_EACH) if socket else None,
            limits=_ONE_REQUEST_EACH,
            headers=({"Authorization": f"Bearer {bearer}"} if bearer else {})
            | ({ORGANISATION_HEADER: organisation} if organisation else {}),
            timeout=timeout_seconds,
            # The authorities that byte threads believe, and SSL_CERT_FILE names. They take 20 ms to load.
            verify=ssl.create_default_context() if address.startswith("https:") else False,
            trust_env=not socket and _host_of(address) not in ("127.0.0.1", "::1", "localhost"),
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
        params: Params | None = None,
        bearer: str | None = None,
        wait_seconds: float = 0,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = body.model_dump_json() if body is not None else None
        longest = self._timeout_seconds + wait_seconds
        try:
            async with asyncio.timeout(longest):
                async with self._http.stream(
                    method,
                    path,
                    content=content,
                    params=params,
                    headers=headers,
                    timeout=httpx2.Timeout(longest, connect=min(_CONNECT_SECONDS, self._timeout_seconds)),
                    extensions={"trace": Handshake()},
                ) as response:
                    answer = await self._read(response, path)
        except httpx2.RequestError as error:
            raise ServiceUnreachableError(self.address, str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise ServiceUnreachableError(self.address, f"no whole answer within {longest:g} s") from error
        if not response.is_success:
            reported = error_from(response.status_code, answer)
            if isinstance(reported, StoreUnavailableError):
                # A gateway's, which does not say in front of whom it stands.
                raise ServiceUnreachableError(self.address, reported.reason)
            raise reported
        return answer

    async def _read(self, response: httpx2.Response, path: str) -> bytes:
        if self._most_bytes is None:
            return await response.aread()
        answer = bytearray()
        async for piece in response.aiter_bytes():
            answer += piece
            if len(answer) > self._most_bytes:
                raise WrongDocumentError(
                    f"the answer for {path}", self.address, f"it has more than {self._most_bytes} bytes"
                )
        return bytes(answer)

    async def _call(
        self,
        kind: type[_Body],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        wait_seconds: float = 0,
    ) -> _Body:
        content = await self._send(method, path, body=body, params=params, wait_seconds=wait_seconds)
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise InternalError(f"{self.address}{path} answered something else than a {kind.__name__}") from error


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError as error:
        raise InvalidRequestError(f"{address} is no service's address ({error}); such as http://mirror:8460") from None


def _wait(seconds: float) -> dict[str, str]:
    return {"wait": str(max(0.0, min(LONGEST_WAIT_SECONDS, seconds)))}


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
        return await self._call(
            Mirror, "GET", f"/mirror/{mirror_id}", params=_wait(wait_seconds), wait_seconds=wait_seconds
        )

    async def follow(
        self, mirror_id: str, interval_seconds: float = 0.5, persistence: Persistence = PERSISTENT
    ) -> AsyncIterator[Mirror]:
        """The mirror again and again, the last time in a terminal state. A silence is endured as ``persistence`` says."""
        while True:
            mirror = await persistence.ask(partial(self.mirror, mirror_id, interval_seconds))
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

    async def follow(
        self, stage_id: str, interval_seconds: float = 0.5, persistence: Persistence = PERSISTENT
    ) -> AsyncIterator[Stage]:
        """The stage again and again, the last time in a terminal state. A silence is endured as ``persistence`` says."""
        while True:
            stage = await persistence.ask(partial(self.stage_by_id, stage_id, interval_seconds))
            yield stage
            if stage.state in STAGE_TERMINAL:
                return

    async def stages(self) -> Stages:
        """``GET /stages``."""
        return await self._call(Stages, "GET", "/stages")

    async def unstage(self, stage_id: str) -> Stage:
        """``DELETE /stages/{id}``."""
        return await self._call(Stage, "DELETE", f"/stages/{stage_id}", wait_seconds=60)

    async def verify(self, request: PathVerificationRequest) -> VerifyReport:
        """``POST /verifications``; the answer comes when all of it has been read, however long that takes."""
        return await self._call(VerifyReport, "POST", "/verifications", body=request, wait_seconds=7 * 24 * 3600)

    async def events(self, params: Params) -> NodeEvents:
        """``GET /events``."""
        return await self._call(NodeEvents, "GET", "/events", params=params)

    async def cache(self) -> Cache:
        """``GET /cache``."""
        return await self._call(Cache, "GET", "/cache")
