"""The routes of the mirror's API: parameters, required roles, and the services that answer."""

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Final
from urllib.parse import quote, unquote

from fastapi import Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from bdn.core.chunk import ByteRange, digest_in
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.source.uri import parse_source
from bdn.mirror.access.access import Access
from bdn.mirror.access.callers import Caller, NotPermittedError
from bdn.mirror.api.caches import caches_router
from bdn.mirror.api.callers import (
    TEXT,
    Agent,
    AgentToken,
    CollectionId,
    Controller,
    EvictionId,
    Lister,
    MirrorId,
    Name,
    Operator,
    Organisation,
    PrefetchId,
    Pushing,
    Requester,
    SecretName,
    TeamController,
    TokenId,
    VerificationId,
)
from bdn.mirror.api.graphql import graphql_router
from bdn.mirror.api.hub import hub_router
from bdn.mirror.api.metrics import Metrics
from bdn.mirror.api.projects import projects_router
from bdn.mirror.api.runs import runs_router
from bdn.mirror.api.training import training_router
from bdn.mirror.api.uploads import uploads_router
from bdn.mirror.api.v1 import v1_router
from bdn.mirror.db import manifests
from bdn.mirror.db.database import Database
from bdn.mirror.db.events import Events, Wanted
from bdn.mirror.db.tables import SecretRow
from bdn.mirror.db.tokens import TokenTable
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.pushes import Pushes
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.job_stages import JobStages
from bdn.mirror.operations.names import Names
from bdn.mirror.operations.requests import Collections, OperationRequests
from bdn.mirror.serving.locations import ChunkLocations
from bdn.mirror.serving.served_chunks import StoreShelf
from bdn.mirror.serving.served_files import ServedFiles
from bdn.mirror.upstream.issuer import DISCOVERY_PATH, JWKS_PATH, IdentityIssuer, Jwk
from bdn.mirror.upstream.sign_ins import Secrets
from bdn.net.api_server import (
    EVENTS,
    Bearer,
    EventStream,
    Traceparent,
    WaitSeconds,
    document_events,
    new_router,
    provided,
)
from bdn.net.chunk_server.served_chunks import ChunkRequest
from bdn.traces import spans
from bdn.wire.access_schema import (
    NewToken,
    Role,
    SecretBody,
    SecretEntry,
    SecretRotation,
    Token,
    TokenRequest,
)
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventDocument, Named
from bdn.wire.grants import Grant
from bdn.wire.heartbeat_schema import AgentDocument, Cluster, Heartbeat, HeartbeatReply
from bdn.wire.http_fields import (
    DATA_PORT_HEADER,
    DELIVERY_HEADER,
    LONGEST_SOURCE,
    MEDIA_CHUNK,
    MEDIA_JSON,
    SUSPECT_HEADER,
    UnsatisfiableRangeError,
    format_content_range,
    parse_range,
)
from bdn.wire.location_schema import AddressesRequest, Delivery, FileAddress, Locations, LocationsRequest
from bdn.wire.mirror_schema import TERMINAL, HeldManifests, HubFile, Mirror, MirrorRequestBody, MirrorStatus, Plan
from bdn.wire.operation_schema import (
    Collection,
    CollectionRequest,
    Eviction,
    EvictionRequest,
    Prefetch,
    PrefetchRequest,
    RestorationRequest,
    RestoredItem,
    Verification,
    VerificationRequest,
)
from bdn.wire.push_schema import (
    ChunkList,
    CommitRequest,
    CommittedPush,
    Push,
    PushGrantDocument,
    PushGrantRequest,
    PushRequest,
)
from bdn.wire.shapes import Items, Page, moment
from bdn.wire.stage_schema import JobStage

logger = logging.getLogger(__name__)

_EVENT_SECONDS = 0.9  # one event at least every second
_PIECE = 1024 * 1024  # bytes per write to uvicorn; its default of 64 KiB halves the rate
# One hour: a new key is known everywhere an hour after it was added, and may sign from then on.
_CACHEABLE: Final = {"Cache-Control": "public, max-age=3600"}
_NO_CURSOR: Final = "cursor is not a next_cursor of this route; leave it out for the first page"


_Limit = Annotated[int, Query(ge=1, le=1000)]

_Requests = Annotated[MirrorRequests, provided(MirrorRequests)]
_Membership = Annotated[Membership, provided(Membership)]
_JobStages = Annotated[JobStages, provided(JobStages)]
_Operations = Annotated[OperationRequests, provided(OperationRequests)]
_Collections = Annotated[Collections, provided(Collections)]
_Events = Annotated[Events, provided(Events)]
_Names = Annotated[Names, provided(Names)]
_Secrets = Annotated[Secrets, provided(Secrets)]
_Tokens = Annotated[TokenTable, provided(TokenTable)]
_Files = Annotated[ServedFiles, provided(ServedFiles)]
_Pushes = Annotated[Pushes, provided(Pushes)]
_Metrics = Annotated[Metrics, provided(Metrics)]


def _write_cursor(at: float, row_id: str) -> str:
    """The cursor of the page after the row with this time and id."""
    return _write_names(repr(at), row_id)


def _read_cursor(cursor: str | None) -> tuple[float, str] | None:
    if (names := _read_names(cursor)) is None:
        return None
    try:
        return float(names[0]), names[1]
    except ValueError:
        raise InvalidRequestError(_NO_CURSOR) from None


def _write_names(one: str, other: str) -> str:
    return base64.urlsafe_b64encode(f"{quote(one)} {quote(other)}".encode()).decode()


def _read_names(cursor: str | None) -> tuple[str, str] | None:
    if cursor is None:
        return None
    try:
        one, other = base64.urlsafe_b64decode(cursor.encode()).decode().split(" ")
    except (ValueError, binascii.Error):
        raise InvalidRequestError(_NO_CURSOR) from None
    if "\0" in (names := (unquote(one), unquote(other)))[0] + names[1]:  # which no database accepts
        raise InvalidRequestError(_NO_CURSOR)
    return names


class _ChunkAnswer(StreamingResponse):
    """The media type of chunks in the OpenAPI document."""

    media_type = MEDIA_CHUNK


_CHUNK: Final[dict[str, Any]] = {
    "response_class": _ChunkAnswer,
    "responses": {
        206: {"description": "The requested range", "content": {MEDIA_CHUNK: {}}},
        416: {"description": "The range begins past the end"},
    },
}


@dataclass(frozen=True)
class ContentsService:
    database: Database
    access: Access
    shelf: StoreShelf
    metrics: Metrics
    data_port: int | None
    delivery: Delivery


_Contents = Annotated[ContentsService, provided(ContentsService)]
_Locations = Annotated[ChunkLocations, provided(ChunkLocations)]

mirrors_router = new_router("mirror")
contents_router = new_router("contents")
pushes_router = new_router("pushes")
control_router = new_router("control")
events_router = new_router("events")
secrets_router = new_router("secrets")
tokens_router = new_router("tokens")
identity_router = new_router("identity")
probes_router = new_router("probes")
ROUTERS: Final = (  # in the order of the OpenAPI document
    mirrors_router,
    contents_router,
    pushes_router,
    projects_router,
    caches_router,
    v1_router,
    graphql_router,
    training_router,
    runs_router,
    hub_router,
    uploads_router,
    control_router,
    events_router,
    secrets_router,
    tokens_router,
    identity_router,
    probes_router,
)


@mirrors_router.post(
    "/mirror", status_code=202, response_model=Mirror | Plan, summary="Mirror sources, or plan it with dry_run"
)
async def post(
    *,
    requests: _Requests,
    body: MirrorRequestBody,
    response: Response,
    caller: Requester,
    traceparent: Traceparent,
    dry_run: Annotated[bool, Query()] = False,
) -> Mirror | Plan:
    sources = body.sources()
    if dry_run:
        response.status_code = 200
        return await requests.plan(sources, caller.organisation, caller.team)
    with spans.request("POST /mirror", traceparent, sources=len(sources)) as span:
        mirror = await requests.request(sources, caller.organisation, caller.team)
        span.set(mirror=mirror.id, status=mirror.status)
    return mirror


@mirrors_router.get("/mirror", summary="Mirrors, newest first")
async def page(
    *,
    requests: _Requests,
    caller: TeamController,
    status: MirrorStatus | None = None,
    source: Annotated[str | None, Query(max_length=LONGEST_SOURCE)] = None,
    cursor: str | None = None,
    limit: _Limit = 100,
) -> Page[Mirror]:
    items, before = await requests.page(
        caller.organisation, status, source, _read_cursor(cursor), limit, team=caller.team
    )
    return Page[Mirror](items=items, next_cursor=before and _write_cursor(*before))


@mirrors_router.get("/mirror/{mirror_id}", summary="A mirror")
async def get(
    *,
    requests: _Requests,
    mirror_id: MirrorId,
    caller: Requester,
    wait: WaitSeconds = 0,
    mount: Annotated[
        str | None,
        Query(min_length=1, max_length=LONGEST_SOURCE, pattern=TEXT, description="Only the source mounted here"),
    ] = None,
) -> Mirror:
    return await requests.wait(mirror_id, caller.organisation, wait, caller.team, mount=mount)


@mirrors_router.get(
    "/mirror/{mirror_id}/events",
    status_code=200,
    response_class=EventStream,
    responses=EVENTS,
    summary="Progress as server-sent events",
)
async def events(requests: _Requests, mirror_id: MirrorId, caller: TeamController) -> EventStream:
    await requests.get(mirror_id, caller.organisation, caller.team)  # refuse before the stream begins
    followed = requests.follow(mirror_id, caller.organisation, _EVENT_SECONDS, caller.team)
    return EventStream(document_events(followed, lambda mirror: mirror.status in TERMINAL))


@mirrors_router.post("/mirror/{mirror_id}/cancel", summary="Stop a mirror; a terminal state stays")
async def cancel(requests: _Requests, mirror_id: MirrorId, caller: Requester) -> Mirror:
    return await requests.cancel(mirror_id, caller.organisation, caller.team)


@mirrors_router.get("/trees", summary="All files of a mirrored commit of a hub, also those that no pattern selected")
async def tree(
    *,
    requests: _Requests,
    caller: Lister,
    source: Annotated[str, Query(min_length=1, max_length=LONGEST_SOURCE, pattern=TEXT)],
    held: Annotated[bool, Query(description="Send no request to the hub")] = False,
    cursor: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> Page[HubFile]:
    """A grant lists the commits that it names."""
    asked = parse_source(source)
    if isinstance(caller, Grant) and not caller.names(asked):
        raise NotFoundError(f"a mirror of {asked}")
    return await requests.trees.page(asked, caller.organisation, caller.team, cursor, is_held=held)


@contents_router.get("/manifests", summary="Manifests, and the tiers that hold them")
async def held(
    *,
    names: _Names,
    caller: Controller,
    cluster: Name = None,
    node: Name = None,
    cursor: str | None = None,
    limit: _Limit = 1000,
) -> HeldManifests:
    """Every manifest of the organisation that some tier holds, by digest; or that the agent of this cluster and node holds.

    A page holds fewer manifests than its limit if very many agents hold them.
    """
    if (cluster is None) != (node is None):
        raise InvalidRequestError("cluster and node name one agent together: give both or none")
    holder = None if cluster is None or node is None else (cluster, node)
    found = await names.held(caller.organisation, "" if cursor is None else digest_in(cursor).hex, limit, holder)
    return found if caller.role is Role.OPERATOR else found.without_holders()


@contents_router.get("/manifests/{digest}", summary="The root of a manifest, which lists its pages")
async def manifest(
    *,
    service: _Contents,
    digest: str,
    request: Request,
    bearer: Bearer,
    traceparent: Traceparent,
    organisation: Organisation = None,
) -> Response:
    name = digest_in(digest)
    owner = await service.access.check_manifest(bearer, name, organisation)
    headers = {"ETag": f'"{name}"', "Cache-Control": "private, no-cache"}
    headers |= {} if service.data_port is None else {DATA_PORT_HEADER: str(service.data_port)}
    headers |= {} if service.delivery == "proxy" else {DELIVERY_HEADER: service.delivery}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        answer = Response(status_code=304, headers=headers)
    else:
        with spans.joined("GET /manifests", traceparent, manifest=str(name)):
            root = await service.shelf.root(name, owner)
        answer = Response(root.content, media_type=MEDIA_JSON, headers=headers)
        service.metrics.served_manifests.inc()
    await manifests.note_use(service.database, name.hex, service.database.now())
    return answer


@contents_router.get("/chunks/{digest}", summary="A chunk's bytes, or a range of them", **_CHUNK)
@contents_router.head("/chunks/{digest}", summary="A chunk's size", **_CHUNK)
async def chunk(service: _Contents, digest: str, request: Request, bearer: Bearer) -> Response:
    name = digest_in(digest)
    organisation = await service.access.check_chunk(bearer, name)
    is_suspect = SUSPECT_HEADER.lower() in request.headers
    asked = ChunkRequest(name, bearer, is_suspect=is_suspect, organisation=organisation)
    opened = await service.shelf.opened(asked)
    headers = {"ETag": f'"{name}"', "Accept-Ranges": "bytes"}
    try:
        part = parse_range(request.headers.get("range"), opened.size)
    except UnsatisfiableRangeError:
        opened.file.close()
        return Response(status_code=416, headers={"Content-Range": f"bytes */{opened.size}"})
    start, size = (part.start, part.size) if part else (0, opened.size)
    headers["Content-Length"] = str(size)
    if part is not None:
        headers["Content-Range"] = format_content_range(part, opened.size)
    status = 200 if part is None else 206
    if request.method == "HEAD":
        opened.file.close()
        return Response(status_code=status, headers=headers, media_type=MEDIA_CHUNK)
    return _ChunkAnswer(_pieces(opened.file, opened.offset + start, size), status, headers)


@contents_router.post("/manifests/{digest}/addresses", summary="Signed addresses of files of a manifest")
async def addresses(
    service: _Files, digest: str, body: AddressesRequest, caller: TeamController, response: Response
) -> Items[FileAddress]:
    response.headers["Cache-Control"] = "no-store"
    found = await service.addresses(digest_in(digest), body.paths, caller.organisation, caller.team)
    return Items[FileAddress](items=found)


@contents_router.get("/files/{digest}/{path:path}", summary="A file, or a range of it, by its signed address", **_CHUNK)
@contents_router.head("/files/{digest}/{path:path}", summary="A file's size", **_CHUNK)
async def file(service: _Files, digest: str, path: str, request: Request, sig: Annotated[str, Query()]) -> Response:
    found = await service.opened(digest_in(digest), path, sig)
    size, tag = found.file.size, f'"{found.file.digest}"'
    headers = {"ETag": tag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-transform"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    asked = request.headers.get("range") if request.headers.get("if-range", tag) == tag else None
    try:
        part = parse_range(asked, size)
    except UnsatisfiableRangeError:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
    headers["Content-Length"] = str(part.size if part else size)
    if part is not None:
        headers["Content-Range"] = format_content_range(part, size)
    status = 200 if part is None else 206
    if request.method == "HEAD" or not size:
        return Response(status_code=status, headers=headers, media_type=MEDIA_CHUNK)
    return _ChunkAnswer(await found.begin(part or ByteRange(0, size)), status, headers)


@contents_router.post(
    "/chunks/locations", summary="Signed addresses at which agents read chunks from the store's bucket"
)
async def locations(service: _Locations, body: LocationsRequest, bearer: Bearer, response: Response) -> Locations:
    response.headers["Cache-Control"] = "no-store"  # the addresses are credentials
    return await service.of(body, bearer)


async def _pieces(file: BinaryIO, start: int, size: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while size and (piece := await asyncio.to_thread(file.read, min(size, _PIECE))):
            size -= len(piece)
            yield piece


@pushes_router.post("/pushes", status_code=201, summary="Begin or continue the push of a checkpoint")
async def begin_push(pushes: _Pushes, contents: _Contents, body: PushRequest, pusher: Pushing) -> Push:
    return await pushes.begin(body.source, pusher, contents.data_port)


@pushes_router.get("/pushes", summary="The push that committed the newest version of a checkpoint")
async def committed_push(
    pushes: _Pushes, source: Annotated[str, Query(min_length=1, max_length=4096)], pusher: Pushing
) -> CommittedPush:
    return await pushes.committed(source, pusher)


@pushes_router.post("/pushes/grants", status_code=201, summary="Grant one rank of a job to push, and nothing else")
async def grant_pushes(pushes: _Pushes, body: PushGrantRequest, caller: TeamController) -> PushGrantDocument:
    return pushes.grant(body, caller.organisation, caller.team)


@pushes_router.post("/pushes/{push_id}/missing", summary="List which of these chunks the client has to send")
async def missing_chunks(pushes: _Pushes, push_id: MirrorId, body: ChunkList, pusher: Pushing) -> ChunkList:
    chunks = [digest_in(name) for name in body.chunks]
    return ChunkList(chunks=[str(one) for one in await pushes.missing(push_id, pusher, chunks)])


@pushes_router.post("/pushes/{push_id}/commit", summary="Commit the sent chunks as a checkpoint; idempotent")
async def commit_push(
    pushes: _Pushes, push_id: MirrorId, body: CommitRequest, pusher: Pushing, agent: AgentToken = None
) -> Mirror:
    return await pushes.commit(push_id, pusher, body, is_agent=await pushes.access.is_agent(agent))


@pushes_router.delete("/pushes/{push_id}", summary="Abandon a push")
async def forget_push(pushes: _Pushes, push_id: MirrorId, pusher: Pushing) -> Mirror:
    return await pushes.forget(push_id, pusher)


@control_router.get("/agents", summary="Agents: tiers, capacity, use, last heartbeat")
async def agents(
    membership: _Membership, _: Controller, cursor: str | None = None, limit: _Limit = 1000
) -> Page[AgentDocument]:
    """In the order of their names."""
    items, last = await membership.agents(_read_names(cursor), limit)
    return Page[AgentDocument](items=items, next_cursor=last and _write_names(*last))


@control_router.delete("/agents", summary="Remove an agent that sends no heartbeats; one that returns counts as new")
async def remove_agent(
    membership: _Membership,
    _: Operator,
    node: Annotated[str, Query(min_length=1, max_length=256, pattern=TEXT)],
    cluster: Name = None,
) -> AgentDocument:
    return await membership.remove(cluster, node)


@control_router.get("/clusters", summary="Clusters, with the sums of their agents and space")
async def clusters(membership: _Membership, _: Controller) -> Items[Cluster]:
    return await membership.clusters()


@control_router.get("/stages", summary="Stages of a job on all nodes, slowest first, or of one node")
async def stages(
    *,
    job_stages: _JobStages,
    caller: TeamController,
    job: Annotated[str | None, Query(min_length=1, max_length=256, pattern=TEXT)] = None,
    cluster: Name = None,
    node: Name = None,
    cursor: str | None = None,
    limit: _Limit = 1000,
) -> Page[JobStage]:
    """Those that failed, then those at work by the part that is filled, then those that are READY.

    Of a job, or of the agent of a cluster and node.
    """
    if job is None:
        if cluster is None or node is None:
            raise InvalidRequestError("name a job, or a cluster and a node")
        return Page[JobStage](items=await job_stages.on_node(caller.of_all_teams(), cluster, node), next_cursor=None)
    if cluster is not None or node is not None:
        raise InvalidRequestError("name either a job, or a cluster and a node")
    items, last = await job_stages.of(caller, job, _read_names(cursor), limit)
    return Page[JobStage](items=items, next_cursor=last and _write_names(*last))


@control_router.post("/agents/heartbeat", summary="Agents only: report state, receive members, commands and keys")
async def heartbeat(membership: _Membership, body: Heartbeat, caller: Agent) -> HeartbeatReply:
    caller.check_cluster(body.cluster)
    return await membership.heartbeat(body)


@control_router.post("/evictions", status_code=202, summary="Evict, or plan it with dry_run")
async def evict(operations: _Operations, body: EvictionRequest, caller: Controller, wait: WaitSeconds = 0) -> Eviction:
    # All organisations share the caches of nodes: an eviction there by age or of everything would affect the other ones,
    # an eviction by a job's name could name a foreign job, and a forced one breaks leases of other jobs.
    if caller.role is not Role.OPERATOR and (body.tier != "mirror" or body.force):
        raise NotPermittedError(
            f"a token of role {caller.role} evicts only with tier mirror and without force; only an operator evicts from the caches of nodes"
        )
    return _shown(caller, await operations.evict(body, caller.organisation, wait))


@control_router.get("/evictions/{eviction_id}", summary="A recorded eviction")
async def eviction(
    operations: _Operations, eviction_id: EvictionId, caller: Controller, wait: WaitSeconds = 0
) -> Eviction:
    return _shown(caller, await operations.get_eviction(eviction_id, caller.organisation, wait))


def _shown(caller: Caller, eviction: Eviction) -> Eviction:
    return eviction if caller.role is Role.OPERATOR else eviction.without_holders()


@control_router.post("/prefetches", status_code=202, summary="Place READY manifests on nodes")
async def prefetch(
    operations: _Operations, body: PrefetchRequest, caller: Controller, wait: WaitSeconds = 0
) -> Prefetch:
    return await operations.prefetch(body, caller.organisation, wait)


@control_router.get("/prefetches/{prefetch_id}", summary="A recorded prefetch, node by node")
async def prefetched(
    operations: _Operations, prefetch_id: PrefetchId, caller: Controller, wait: WaitSeconds = 0
) -> Prefetch:
    return await operations.get_prefetch(prefetch_id, caller.organisation, wait)


@control_router.post("/verifications", status_code=202, summary="Verify held content, and repair damaged chunks")
async def verify(
    operations: _Operations, body: VerificationRequest, caller: Controller, wait: WaitSeconds = 0
) -> Verification:
    # Likewise: reading a node's cache slows down all its jobs, and ``all`` covers all organisations.
    if caller.role is not Role.OPERATOR and (body.tier != "mirror" or body.all):
        raise NotPermittedError(
            f"a token of role {caller.role} verifies only a source or a manifest, with tier mirror; only an operator verifies anything else"
        )
    return await operations.verify(body, caller.organisation, wait)


@control_router.get("/verifications/{verification_id}", summary="A recorded verification")
async def verification(
    operations: _Operations, verification_id: VerificationId, caller: Controller, wait: WaitSeconds = 0
) -> Verification:
    return await operations.get_verification(verification_id, caller.organisation, wait)


@control_router.post("/collections", status_code=202, summary="Collect unreferenced content, or plan it with dry_run")
async def collect(collections: _Collections, body: CollectionRequest, _: Operator, wait: WaitSeconds = 0) -> Collection:
    return await collections.start(body, wait)


@control_router.get("/collections/{collection_id}", summary="A recorded collection")
async def collection(
    collections: _Collections, collection_id: CollectionId, _: Operator, wait: WaitSeconds = 0
) -> Collection:
    return await collections.get(collection_id, wait)


@control_router.post(
    "/restorations", summary="Restore manifests that were evicted from the mirror and are not collected yet"
)
async def restore(operations: _Operations, body: RestorationRequest, caller: Controller) -> Items[RestoredItem]:
    return await operations.store_eviction.restore(body, caller.organisation)


def _wanted(
    manifest: Annotated[list[str] | None, Query(max_length=MANIFESTS_AT_ONCE)] = None,
    digest: Annotated[str | None, Query(description="Digest of a file or a chunk")] = None,
    node: Name = None,
) -> Wanted:
    manifests = [digest_in(one).hex for one in manifest] if manifest else None
    return Wanted(manifests, digest and digest_in(digest).hex, node)


@events_router.get("/events", summary="Recorded decisions, newest first", operation_id="page_events_get")
async def events_page(
    events: _Events,
    caller: Controller,
    wanted: Annotated[Wanted, Depends(_wanted)],
    cursor: Name = None,
    limit: _Limit = 100,
) -> Page[EventDocument]:
    items, before = await events.page(caller.organisation, wanted, _read_cursor(cursor), limit)
    return Page[EventDocument](items=items, next_cursor=before and _write_cursor(*before))


@events_router.get("/names", summary="Find what a digest or a source names")
async def find(
    names: _Names, caller: Controller, of: Annotated[str, Query(min_length=1, max_length=4096, pattern=TEXT)]
) -> Named:
    return await names.find(of, caller.organisation)


@secrets_router.get("/secrets", summary="Secrets: names and dates, never values")
async def list_secrets(secrets: _Secrets, caller: Controller) -> Items[SecretEntry]:
    return await _entries(secrets, caller.organisation)


@secrets_router.put("/secrets/{name}", summary="Create a secret, or change its value")
async def put_secret(secrets: _Secrets, name: SecretName, body: SecretBody, caller: Controller) -> SecretEntry:
    body.check()
    row = await secrets.table.set(caller.organisation, name, body.value)
    logger.info("secret set", extra={"secret": name, "organisation": caller.organisation})
    return await _entry(secrets, row)


@secrets_router.post("/secrets/rotate", summary="Encrypt secrets with the first key of BDN_SECRETS_KEY")
async def rotate_secrets(secrets: _Secrets, caller: Controller, named: Organisation = None) -> SecretRotation:
    """Rotates the secrets of all organisations if an operator names none; otherwise the organisation's own."""
    organisation = caller.organisation
    is_for_all = caller.role is Role.OPERATOR and named is None
    await secrets.table.rotate(organisation)
    left = await secrets.table.rotate_others(organisation) if is_for_all else None
    logger.info("secrets rotated", extra={"organisation": "all" if is_for_all else organisation})
    return SecretRotation(items=(await _entries(secrets, organisation)).items, others_left=left)


@secrets_router.delete("/secrets/{name}", status_code=204, summary="Delete a secret")
async def remove_secret(secrets: _Secrets, name: SecretName, caller: Controller) -> None:
    organisation = caller.organisation
    await secrets.table.remove(organisation, name)
    logger.info("secret removed", extra={"secret": name, "organisation": organisation})


async def _entries(secrets: Secrets, organisation: str) -> Items[SecretEntry]:
    return Items[SecretEntry](items=[await _entry(secrets, row) for row in await secrets.table.rows(organisation)])


async def _entry(secrets: Secrets, row: SecretRow) -> SecretEntry:
    return SecretEntry(
        name=row.name,
        created_at=moment(row.created_at),
        updated_at=moment(row.updated_at),
        sealed_with=secrets.table.keyring.sealed_with(row.ciphertext),
        outranked=await secrets.is_outranked(row.name, row.organisation),
    )


@tokens_router.post("/tokens", status_code=201, summary="Create a token; its value is shown only once")
async def create_token(table: _Tokens, body: TokenRequest, _: Operator) -> NewToken:
    body.check()
    made = await table.create(body)
    logger.info("token made", extra={"token_id": made.id, "organisation": made.organisation, "role": made.role})
    return made


@tokens_router.get("/tokens", summary="Tokens of all organisations, without their values")
async def list_tokens(table: _Tokens, _: Operator) -> Items[Token]:
    return Items[Token](items=await table.all())


@tokens_router.delete("/tokens/{token_id}", summary="Revoke a token, at once and for good")
async def revoke_token(table: _Tokens, token_id: TokenId, _: Operator) -> Token:
    revoked = await table.revoke(token_id)
    logger.info("token revoked", extra={"token_id": revoked.id, "organisation": revoked.organisation})
    return revoked


async def _issuer(request: Request) -> IdentityIssuer:
    found: IdentityIssuer | None = request.app.state.provided.get(IdentityIssuer)
    if found is None:
        raise NotFoundError("an OpenID issuer (the operator sets BDN_ISSUER_URL)")
    return found


_Issuer = Annotated[IdentityIssuer, Depends(_issuer)]


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


@probes_router.get("/healthz", summary="The process is alive")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@probes_router.get("/readyz", summary="Database and store are reachable")
async def readyz(metrics: _Metrics) -> dict[str, str]:
    await metrics.check_ready()
    return {"status": "ok"}


@probes_router.get("/metrics", summary="Prometheus", response_class=PlainTextResponse)
async def metrics(metrics: _Metrics) -> Response:
    return Response(await metrics.render(), media_type=CONTENT_TYPE_LATEST)
