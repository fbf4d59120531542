"""The control API and its unix socket."""

import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import HTTPConnection

from bdn import __version__
from bdn.core.errors import InUseError, InvalidRequestError, NotFoundError, UnauthenticatedError
from bdn.disk.durable import disk_errors
from bdn.disk.threads import in_thread
from bdn.net.api_server import (
    CALLER,
    EVENTS,
    OWNER,
    EventStream,
    Traceparent,
    WaitSeconds,
    bind_tcp,
    document_events,
    new_router,
    new_service,
    provided,
    serving,
    serving_probes,
)
from bdn.traces import spans
from bdn.wire.cache_schema import CacheSummaryDocument, Removal, RemovalRequest, SharedCachesDocument, SummaryRequest
from bdn.wire.event_schema import EventDocument, NodeEvents, StagedPath
from bdn.wire.job_schema import JobVolume, JobVolumeRequest
from bdn.wire.operation_schema import PathVerification, PathVerificationRequest
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import (
    TERMINAL,
    Cache,
    PullCheck,
    PullLosses,
    PullRequest,
    RenewRequest,
    StageDocument,
    StageRequest,
)
from node_agent.app import Agent
from node_agent.gateway import serving_gateway

_TEXT: Final = r"^[^\x00]*$"
_Agent = Annotated[Agent, provided(Agent)]

logger = logging.getLogger(__name__)
stages_router = new_router("stages")
pulls_router = new_router("pulls")
volumes_router = new_router("job volumes")
caches_router = new_router("caches")
service_router = new_router("service")
probes_router = new_router("service")


async def _check_owner(connection: HTTPConnection) -> None:
    """A pull writes to any path, so only the agent's own user, in the same mount namespace, may request it.

    Raises ``UnauthenticatedError``: the caller is another user, uses the port, or runs in a container.
    """
    if not getattr(connection.state, OWNER, False):
        raise UnauthenticatedError(
            "a pull is for the user of this agent alone, over its unix socket, and from its own mount namespace: not from a container, "
            "nor for a service with PrivateTmp; stage the files with POST /stages"
        )


async def _check_caller(head: HTTPConnection) -> str:
    """Runs before a body is read. The agent has no tokens: callers are identified by their connection.

    The mode of the unix socket admits the agent's user and group; the loopback port rejects what browsers send for
    foreign pages (``serving(is_local=True)``). Pulls are for the agent's own user.
    """
    if head.url.path.startswith("/pulls"):
        await _check_owner(head)
    user = getattr(head.state, CALLER, None)
    return "" if user is None else f"user {user}"


def build_app(agent: Agent) -> FastAPI:
    return new_service(
        "BDN node agent",
        limit_request_bytes=agent.settings.limit_request_bytes,
        authenticate=_check_caller,
        routers=(stages_router, pulls_router, volumes_router, caches_router, service_router, probes_router),
        provides=(agent,),
    )


@stages_router.post("/stages", status_code=202, responses={201: {"model": StageDocument, "description": "READY"}})
async def stage(agent: _Agent, request: StageRequest, response: Response, traceparent: Traceparent) -> StageDocument:
    """Make a grant's files appear on this node for a job. Idempotent."""
    with spans.request("POST /stages", traceparent, job=request.job_id) as span:
        begun = await agent.stages.start(
            request.job_id, request.grant, request.ttl_seconds, warm=request.warm, view=request.view
        )
        span.set(stage=begun.record.id, state=begun.record.state)
    if not request.wait:
        return agent.stages.document(begun)
    response.status_code = 201
    return await agent.stages.finish(begun.record.id)


@stages_router.get("/stages")
async def all_stages(agent: _Agent) -> Items[StageDocument]:
    """Every stage that the agent knows, newest first; released stages are known for a week."""
    return Items[StageDocument](items=[agent.stages.document(known) for known in agent.stages.registry.all()])


@stages_router.get("/stages/{stage_id}")
async def one_stage(agent: _Agent, stage_id: str, wait: WaitSeconds = 0) -> StageDocument:
    """A stage; with ``wait`` the answer comes when the state is terminal, or at the timeout."""
    found = agent.stages.registry.find(stage_id)
    await found.wait(wait)
    return agent.stages.document(found)


@stages_router.get("/stages/{stage_id}/events", status_code=200, response_class=EventStream, responses=EVENTS)
async def stage_events(agent: _Agent, stage_id: str) -> EventStream:
    """``progress`` at least every second while a task works on the stage, then ``done``; the data is the stage."""
    found = agent.stages.registry.find(stage_id)  # an error must precede the stream
    followed = agent.stages.follow(found.record.id, 1.0)
    return EventStream(document_events(followed, lambda stage: stage.state in TERMINAL))


@stages_router.post("/stages/{stage_id}/renew")
async def renew(agent: _Agent, stage_id: str, request: RenewRequest) -> StageDocument:
    """Set a new time to live, from now on."""
    return agent.stages.document(await agent.stages.renew(stage_id, request.ttl_seconds))


@stages_router.delete("/stages/{stage_id}")
async def release(agent: _Agent, stage_id: str) -> StageDocument:
    """Unmount, drop the view, end the lease. Idempotent. The files stay in the cache."""
    return agent.stages.document(await agent.stages.release(stage_id))


@volumes_router.post("/job-volumes", status_code=201)
async def make_volume(agent: _Agent, request: JobVolumeRequest, http: Request) -> JobVolume:
    """Create the volume that a rank may write on this node. Idempotent during its run."""
    return (await agent.volumes.create(request, getattr(http.state, CALLER, None))).document()


@volumes_router.get("/job-volumes")
async def all_volumes(agent: _Agent) -> Items[JobVolume]:
    """Every job volume of this node, newest first."""
    return Items[JobVolume](items=[volume.document() for volume in agent.volumes.all()])


@volumes_router.get("/job-volumes/{volume_id}")
async def one_volume(agent: _Agent, volume_id: str, wait: WaitSeconds = 0) -> JobVolume:
    """A job volume; with ``wait`` the answer comes when its state or its error changes, or at the timeout."""
    found = agent.volumes.find(volume_id)
    await agent.volumes.wait(found, wait)
    return found.document()


@volumes_router.delete("/job-volumes/{volume_id}")
async def end_volume(agent: _Agent, volume_id: str) -> JobVolume:
    """End a run: scratch is removed now, the volume once its checkpoints are pushed."""
    found = agent.volumes.find(volume_id)
    await agent.volumes.end(found)
    return found.document()


@pulls_router.post("/pulls/checks", dependencies=[Depends(_check_owner)])
async def check_pull(agent: _Agent, request: PullCheck) -> PullLosses:
    """Refuse a directory where no pull could be published; with a grant, list the files that would be lost there."""
    await agent.pulls.check_destination(Path(request.destination), hub=request.hub)
    return (
        PullLosses()
        if request.grant is None
        else await agent.pulls.would_lose(request.grant, Path(request.destination))
    )


@pulls_router.post("/pulls", status_code=202, dependencies=[Depends(_check_owner)])
async def pull(agent: _Agent, request: PullRequest, traceparent: Traceparent) -> StageDocument:
    """Publish the files of a grant's only manifest at a directory; the stage is released once the directory is gone."""
    with spans.request("POST /pulls", traceparent) as span:
        begun = await agent.pulls.begin(request.grant, Path(request.destination), link=request.link, hub=request.hub)
        span.set(stage=begun.record.id)
    return agent.stages.document(begun)


@caches_router.get("/shared-caches")
async def shared_caches(agent: _Agent) -> SharedCachesDocument:
    """The volume of training caches, created at the first use, and the caches that jobs of this node have mounted."""
    return await agent.caches.document()


@caches_router.post("/shared-caches/summary")
async def summarize_cache(agent: _Agent, request: SummaryRequest) -> CacheSummaryDocument:
    """Measure a project's cache now and report it to the mirror."""
    return await agent.caches.capture(request.project)


@caches_router.post("/shared-caches/removals")
async def remove_from_cache(agent: _Agent, request: RemovalRequest) -> Removal:
    """Delete below a project's cache; refused while jobs have it mounted, unless by force."""
    return await agent.caches.remove(request)


@service_router.get("/cache")
async def cache(agent: _Agent) -> Cache:
    """What the cache holds, least recently used first."""
    return await agent.holdings.document()


@service_router.post("/verifications")
async def verify(agent: _Agent, request: PathVerificationRequest) -> PathVerification:
    """Verify and repair a staged file, or all files below a folder; the answer comes at the end."""
    return await agent.verifications.look_at(request)


@service_router.get("/events")
async def events(
    agent: _Agent,
    path: Annotated[str | None, Query(min_length=1, max_length=4096, pattern=_TEXT)] = None,
    mention: Annotated[str, Query(max_length=256, pattern=_TEXT, description="Such as a digest or a job")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
) -> NodeEvents:
    """Events of this node, newest first: about the file at a path of a view, or all that mention a text."""
    staged = None if path is None else await _staged(agent, PurePosixPath(path))
    mention = mention if staged is None else staged.manifest
    return NodeEvents(staged=staged, items=list(map(EventDocument.of, await agent.events(mention, limit))))


async def _staged(agent: Agent, path: PurePosixPath) -> StagedPath:
    """Released stages are known for a week.

    Raises ``NotFoundError``: no known stage shows the path, or its manifest has no such file.
    """
    stage, mount, name = agent.stages.showing(path)
    manifest = await agent.cache.manifest(mount.digest)
    inside = {} if manifest is None else {entry.path: entry for entry in manifest.files}
    entry = inside.get(name)
    is_folder = name == "." or any(other.startswith(f"{name}/") for other in inside)
    if manifest is not None and entry is None and not is_folder:
        raise NotFoundError(f"{name} of manifest {mount.manifest}")
    index = agent.cache.index
    return StagedPath(
        path=str(path),
        stage=agent.stages.document(stage),
        mount_location=mount.mount_location,
        manifest=mount.manifest,
        name=name,
        digest=str(entry.digest) if entry else None,
        size=entry.size if entry else None,
        cached=index.ledger.is_committed(entry.digest) if entry else index.is_complete(mount.digest),
    )


@probes_router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@probes_router.get("/readyz")
async def readyz(agent: _Agent) -> dict[str, str]:
    """The agent can take new stages."""
    await agent.check_ready()
    return {"status": "ok"}


@probes_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(agent: _Agent) -> Response:
    """Figures for Prometheus."""
    return Response(agent.metrics.render(await agent.holdings.tiers()), media_type=CONTENT_TYPE_LATEST)


@asynccontextmanager
async def serving_api(agent: Agent) -> AsyncIterator[str]:
    """Serve the API on its unix socket and, if set, on a loopback port: the API has no authentication of its own.

    Serves the hub gateway, too, if it is set, and yields its URL, else "".

    Raises ``InUseError``, ``InvalidRequestError``: the socket or the port is in use or cannot be opened.
    """
    app, settings = build_app(agent), agent.settings
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(app, stack.enter_context(unix_socket(settings.effective_socket))))
        if settings.port is not None:
            listener = bind_tcp("127.0.0.1", settings.port)
            await stack.enter_async_context(serving(app, listener, is_local=True, certificate=agent.certificate))
        probes = await stack.enter_async_context(
            serving_probes(settings.metrics, probes_router, (agent,), agent.certificate)
        )
        gateway = await stack.enter_async_context(serving_gateway(agent))
        index, budgets = agent.cache.index.ledger, await in_thread(agent.cache.space.room)
        started = {
            "version": __version__,
            "node": settings.node,
            "cluster": settings.cluster,
            "roles": ",".join(settings.roles),
            "socket": str(settings.effective_socket),
            "data": f"{settings.host}:{agent.data_port}",
            "mirror": settings.url,
            "cache": str(settings.effective_cache_dir),
            "held_bytes": index.committed_bytes,
            "budget_bytes": budgets.budgets.node,
            "cluster_budget_bytes": budgets.budgets.cluster,
        }
        started |= {} if settings.port is None else {"port": settings.port}
        logger.info("agent started", extra=started | ({"metrics": f"{probes}/metrics"} if probes else {}))
        try:
            yield gateway
        finally:
            logger.info("agent stops", extra={"node": settings.node, "cluster": settings.cluster})


_LONGEST_PATH: Final = 107  # bytes; unix(7)


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at ``path``, for the owner and the group; the file is removed with the context.

    Replaces the socket of a dead agent, but not a socket that answers.

    Raises:
        InUseError: an agent answers there.
        InvalidRequestError: the path is longer than the kernel allows.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidRequestError(
            f"BDN_AGENT_SOCKET: {path} is longer than the {_LONGEST_PATH} bytes of a socket's path; name a shorter one"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        os.fchmod(listener.fileno(), 0o660)  # before bind, so that the file is never open to other users
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                _check_dead(path)
                path.unlink()
            listener.bind(str(path))
            path.chmod(0o660)  # the umask removed some bits
            inode = path.stat().st_ino
        try:
            listener.listen(128)
            yield listener
        finally:
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()


def _check_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise InUseError(f"socket {path}", ("another agent",))
