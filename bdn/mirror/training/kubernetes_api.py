"""A thin client of the Kubernetes API: it creates, lists, annotates and deletes objects of training jobs.

Five calls need no client library, whose models would be a hundred times the size of this file (ADR 70).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from bdn.core.errors import InvalidRequestError, StoreUnavailableError, UnauthenticatedError
from bdn.mirror.access.clusters import PodJobs
from bdn.net.client import read_token
from bdn.net.tls import Authorities
from bdn.wire.http_fields import authorization, is_loopback

_SECONDS: Final = 10.0  # for each step of a call
_LARGEST: Final = 64 * 1024**2  # bytes of an answer
_AT_ONCE: Final = 500  # objects of an answer
_LONGEST: Final = 1000  # characters of a message
_REFUSED: Final = (400, 422)
_EXISTS: Final = 409
_ABSENT: Final = 404


class ClusterUnavailableError(StoreUnavailableError):
    template = "Kubernetes cluster {cluster!r} cannot run jobs now: {reason}"
    cluster: str


class RefusedObjectError(InvalidRequestError):
    """Kubernetes says that the object is wrong, so a retry is refused as well."""


# --- the documents, with the fields that are read ---


class _Document(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, frozen=True)


class Metadata(_Document):
    name: str
    uid: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None

    @property
    def is_deleted(self) -> bool:
        """Deletion was requested; containers may still run."""
        return self.deletion_timestamp is not None


class Condition(_Document):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class ContainerWaiting(_Document):
    reason: str = ""
    message: str = ""


class Terminated(_Document):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""

    @property
    def code(self) -> int:
        """As a shell reports it."""
        return (128 + self.signal if self.signal else self.exit_code) & 255


class ContainerState(_Document):
    waiting: ContainerWaiting | None = None
    running: dict[str, JsonValue] | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Document):
    name: str
    state: ContainerState = ContainerState()


class PodSpec(_Document):
    node_name: str = ""


class _Status(_Document):
    conditions: list[Condition] = []

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type if it is true."""
        return next((one for one in self.conditions if one.type == kind and one.status == "True"), None)


class PodStatus(_Status):
    phase: str = ""
    reason: str = ""
    message: str = ""
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []


class Pod(_Document):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def state_of(self, container: str) -> ContainerState:
        """Of a container; without any field before the kubelet reported it."""
        known = (*self.status.init_container_statuses, *self.status.container_statuses)
        return next((one.state for one in known if one.name == container), ContainerState())


class JobSpec(_Document):
    suspend: bool = False


class KubernetesJob(_Document):
    metadata: Metadata
    spec: JobSpec = JobSpec()
    status: _Status = _Status()

    @property
    def is_finished(self) -> bool:
        return any(self.status.condition(kind) for kind in ("Complete", "Failed"))


class _Object(_Document):
    metadata: Metadata


class _Refusal(_Document):
    message: str = ""


class _ListMetadata(_Document):
    following: str = Field(default="", alias="continue")


class _List(_Document):
    metadata: _ListMetadata
    items: list[dict[str, JsonValue]]


_Kind = TypeVar("_Kind", bound=_Document)


# --- the client ---


@dataclass(frozen=True)
class ApiConnection:
    """To one API server, for a few calls, each of which may raise ``ClusterUnavailableError``."""

    cluster: str
    http: httpx2.AsyncClient

    async def listed(self, kind: type[_Kind], path: str, selector: str) -> list[_Kind]:
        """All objects of a path with these labels, as of now."""
        found: list[_Kind] = []
        following: str | None = ""
        while following is not None:
            params = {"labelSelector": selector, "limit": str(_AT_ONCE), "continue": following}
            body = await self._answer("GET", path, params=params)
            page, following = await asyncio.to_thread(self._page, kind, body)
            found += page
        return found

    def _page(self, kind: type[_Kind], body: bytes | None) -> tuple[list[_Kind], str | None]:
        """The objects of a page, and the name of the next one. Takes a tenth of a second for 500 pods."""
        answer = self._parsed(_List, body)
        return [self._parsed(kind, one) for one in answer.items], answer.metadata.following or None

    async def create(self, path: str, manifest: Mapping[str, JsonValue]) -> str | None:
        """Create an object in a path. Returns its uid, or None if it exists. Raises ``RefusedObjectError``."""
        body = await self._answer("POST", path, manifest, accepts=(_EXISTS,))
        return None if body is None else self._parsed(_Object, body).metadata.uid

    async def uid_of(self, path: str) -> str:
        return self._parsed(_Object, await self._answer("GET", path)).metadata.uid

    async def annotate(self, path: str, uid: str, annotations: Mapping[str, JsonValue]) -> bool:
        """Set annotations of the object with this uid. Returns False if it is gone."""
        manifest: dict[str, JsonValue] = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        return await self._answer("PATCH", path, manifest, accepts=(_ABSENT, _EXISTS)) is not None

    async def delete(self, path: str) -> None:
        """Delete an object once all that it owns is deleted. Idempotent."""
        await self._answer("DELETE", path, params={"propagationPolicy": "Foreground"}, accepts=(_ABSENT, _EXISTS))

    async def _answer(
        self,
        method: str,
        path: str,
        manifest: Mapping[str, JsonValue] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        accepts: tuple[int, ...] = (),
    ) -> bytes | None:
        """The body of a success; None for a status in ``accepts``."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            request = self.http.stream(
                method, path, params=params, json=manifest, headers={"Content-Type": kind} if manifest else None
            )
            async with request as answer:
                body = bytearray()
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > _LARGEST:
                        raise ClusterUnavailableError(f"an answer has more than {_LARGEST} bytes", self.cluster)
        except (httpx2.HTTPError, OSError) as error:
            raise ClusterUnavailableError(str(error) or type(error).__name__, self.cluster) from error
        if answer.is_success:
            return bytes(body)
        if answer.status_code in accepts:
            return None
        said = f"status {answer.status_code} for {method} {path}: {_message_in(bytes(body))}"
        if manifest is not None and answer.status_code in _REFUSED:
            raise RefusedObjectError(f"Kubernetes cluster {self.cluster!r} refuses the job: {said}")
        raise ClusterUnavailableError(said, self.cluster)

    def _parsed(self, kind: type[_Kind], content: bytes | dict[str, JsonValue] | None) -> _Kind:
        try:
            return (
                kind.model_validate(content) if isinstance(content, dict) else kind.model_validate_json(content or b"")
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said = f"its answer is not a {kind.__name__}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ClusterUnavailableError(said, self.cluster) from None


class KubernetesApi:
    def __init__(self, cluster: str, jobs: PodJobs) -> None:
        """Blocking. Raises ``InvalidRequestError`` if the file of authorities cannot be used."""
        self.cluster = cluster
        self._jobs = jobs
        is_safe = urlsplit(jobs.api).scheme == "https"
        self._authorities = Authorities(
            jobs.ca if is_safe else None, setting=f"BDN_KUBERNETES: clusters.{cluster}.jobs.ca"
        )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[ApiConnection]:
        """A connection with the token and the authorities of now. Raises ``ClusterUnavailableError``."""
        try:
            token = await asyncio.to_thread(read_token, self._jobs.token_file)
            context = await asyncio.to_thread(self._authorities.context)
        except (UnauthenticatedError, InvalidRequestError) as error:
            raise ClusterUnavailableError(str(error), self.cluster) from None
        is_near = is_loopback(urlsplit(self._jobs.api).hostname or "")
        async with httpx2.AsyncClient(
            base_url=self._jobs.api,
            verify=context,
            trust_env=not is_near,
            timeout=_SECONDS,
            headers=authorization(token),
        ) as http:
            yield ApiConnection(self.cluster, http)


def _message_in(body: bytes) -> str:
    """What Kubernetes says in a ``Status``, or the beginning of another answer."""
    try:
        said = _Refusal.model_validate_json(body).message
    except ValidationError:
        said = body.decode("utf-8", "replace")
    return said[:_LONGEST]
