"""API clients of the mirror and of the agent, with a method for each route."""

from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from bdn.core.chunk import Digest
from bdn.net.client import ContentClient, OutageRetry, Params, ServiceClient
from bdn.wire.access_schema import (
    NewToken,
    SecretBody,
    SecretEntry,
    SecretRotation,
    Team,
    TeamRequest,
    Token,
    TokenRequest,
)
from bdn.wire.cache_schema import (
    CacheGrantDocument,
    CacheLimit,
    CacheRequest,
    Caches,
    CacheSummaryBody,
    CacheSummaryDocument,
    ProjectCache,
    Removal,
    RemovalRequest,
    SharedCachesDocument,
    SummaryRequest,
    TrainingCacheDirectory,
)
from bdn.wire.event_schema import EventDocument, Named, NodeEvents
from bdn.wire.heartbeat_schema import AgentDocument, Heartbeat, HeartbeatReply
from bdn.wire.http_fields import authorization
from bdn.wire.hub_schema import HubAnswer, HubRequest
from bdn.wire.job_schema import JobVolume, JobVolumeRequest
from bdn.wire.location_schema import Locations, LocationsRequest
from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import HeldManifests, HubFile, Mirror, MirrorRequestBody, MirrorStatus, Plan
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
from bdn.wire.push_schema import (
    Checkpoint,
    ChunkList,
    CommitRequest,
    CommittedPush,
    Project,
    Push,
    PushGrantDocument,
    PushGrantRequest,
    PushRequest,
)
from bdn.wire.run_schema import RunOutput, RunSpec
from bdn.wire.shapes import Items, Page
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import Cache, JobStage, PullCheck, PullLosses, PullRequest, StageDocument, StageRequest
from bdn.wire.training_schema import (
    LogPage,
    LogQuery,
    TrainingJob,
    TrainingJobAnswer,
    TrainingJobsAnswer,
    TrainingJobSearch,
)

_Paged = TypeVar("_Paged", bound=Page[Any])


class MirrorClient(ContentClient):
    async def request(self, body: MirrorRequestBody) -> Mirror:
        return await self._call(Mirror, "POST", "/mirror", body=body)

    async def plan(self, body: MirrorRequestBody) -> Plan:
        """``request`` as a dry run; listing a large source may take minutes."""
        return await self._call(Plan, "POST", "/mirror", body=body, params={"dry_run": "true"}, wait_seconds=600)

    async def mirror(self, mirror_id: str, wait_seconds: float = 0, mount: str | None = None) -> Mirror:
        """With ``mount`` the source with this mount location alone, and a grant for it alone."""
        params = {} if mount is None else {"mount": mount}
        return await self._poll(Mirror, "GET", f"/mirror/{mirror_id}", wait_seconds, params=params)

    async def mirrors(
        self, status: MirrorStatus | None = None, source: str | None = None, limit: int = 100
    ) -> list[Mirror]:
        """The newest mirrors of the organisation, of this status, or of this source."""
        given = {"status": status, "source": source, "limit": str(limit)}
        params = {name: value for name, value in given.items() if value is not None}
        return (await self._call(Page[Mirror], "GET", "/mirror", params=params)).items

    def follow(
        self, mirror_id: str, interval_seconds: float = 0.5, outages: OutageRetry | None = None
    ) -> AsyncIterator[Mirror]:
        """Yield the mirror repeatedly, the last time in a terminal state.

        ``outages`` limits how long it may be down.
        """
        look = partial(self.mirror, mirror_id, interval_seconds)
        return (outages or OutageRetry()).follow(look, lambda mirror: mirror.status in MIRROR_TERMINAL)

    async def tree(self, source: str, *, is_held: bool) -> list[HubFile]:
        return [file async for page in self.tree_pages(source, is_held=is_held) for file in page]

    async def tree_pages(
        self, source: str, *, is_held: bool = False, bearer: str | None = None, outages: OutageRetry | None = None
    ) -> AsyncIterator[list[HubFile]]:
        """All files of a mirrored commit. The mirror may list them first, which takes minutes for a million.

        ``bearer``: a grant of the commit, instead of the client's token.
        """
        cursor: str | None = "0"
        while cursor is not None:
            params = {"source": source, "held": str(is_held).lower(), "cursor": cursor}
            ask = partial(self._tree_page, params, authorization(bearer))
            page = await (ask() if outages is None else outages.ask(ask))
            yield page.items
            cursor = page.next_cursor

    async def _tree_page(self, params: Params, headers: Mapping[str, str]) -> Page[HubFile]:
        return await self._call(Page[HubFile], "GET", "/trees", params=params, headers=headers, wait_seconds=600)

    async def held(self) -> HeldManifests:
        return await self._all(HeldManifests, "/manifests")

    async def _all(self, kind: type[_Paged], path: str, wait_seconds: float = 0, **params: str) -> _Paged:
        """The first page, with the items of all pages."""
        found = page = await self._call(kind, "GET", path, params=params, wait_seconds=wait_seconds)
        while page.next_cursor is not None:
            params["cursor"] = page.next_cursor
            page = await self._call(kind, "GET", path, params=params, wait_seconds=wait_seconds)
            found.items += page.items
        return found.model_copy(update={"next_cursor": None})

    async def evict(self, request: EvictionRequest, wait_seconds: float = 0) -> Eviction:
        return await self._poll(Eviction, "POST", "/evictions", wait_seconds, body=request)

    async def eviction(self, eviction_id: str, wait_seconds: float = 0) -> Eviction:
        return await self._poll(Eviction, "GET", f"/evictions/{eviction_id}", wait_seconds)

    async def prefetch(self, request: PrefetchRequest, wait_seconds: float = 0) -> Prefetch:
        return await self._poll(Prefetch, "POST", "/prefetches", wait_seconds, body=request)

    async def prefetch_by_id(self, prefetch_id: str, wait_seconds: float = 0) -> Prefetch:
        return await self._poll(Prefetch, "GET", f"/prefetches/{prefetch_id}", wait_seconds)

    async def agents(self) -> Page[AgentDocument]:
        return await self._all(Page[AgentDocument], "/agents")

    async def stages(self, job: str) -> Page[JobStage]:
        """The job's stages on all nodes, slowest first."""
        return await self._all(Page[JobStage], "/stages", job=job)

    async def remove_agent(self, node: str, cluster: str | None) -> AgentDocument:
        params = {"node": node} if cluster is None else {"node": node, "cluster": cluster}
        return await self._call(AgentDocument, "DELETE", "/agents", params=params)

    async def locate(self, manifest: Digest, digests: Iterable[Digest], bearer: str) -> Locations:
        """Locations of chunks of the manifest, for the bearer of its grant."""
        request = LocationsRequest(manifest=str(manifest), digests=[str(digest) for digest in digests])
        return await self._call(Locations, "POST", "/chunks/locations", body=request, headers=authorization(bearer))

    async def grant_pushes(self, body: PushGrantRequest) -> PushGrantDocument:
        return await self._call(PushGrantDocument, "POST", "/pushes/grants", body=body)

    async def begin_push(self, body: PushRequest) -> Push:
        return await self._call(Push, "POST", "/pushes", body=body)

    async def committed_push(self, source: str) -> CommittedPush:
        return await self._call(CommittedPush, "GET", "/pushes", params={"source": source})

    async def missing(self, push_id: str, chunks: ChunkList) -> ChunkList:
        return await self._call(ChunkList, "POST", f"/pushes/{push_id}/missing", body=chunks)

    async def commit(self, push_id: str, body: CommitRequest) -> Mirror:
        # A million files take minutes.
        return await self._call(Mirror, "POST", f"/pushes/{push_id}/commit", body=body, wait_seconds=600)

    async def checkpoints(self, project: str | None = None, job: str | None = None) -> Items[Checkpoint]:
        named = {"project": project, "job": job}
        given = {name: value for name, value in named.items() if value is not None}
        return await self._call(Items[Checkpoint], "GET", "/checkpoints", params=given)

    async def remove_checkpoint(self, checkpoint_id: str) -> Checkpoint:
        return await self._call(Checkpoint, "DELETE", f"/checkpoints/{checkpoint_id}")

    async def projects(self) -> Items[Project]:
        return await self._call(Items[Project], "GET", "/projects")

    async def remove_project(self, project: str) -> Project:
        # Thousands of checkpoints take minutes.
        return await self._call(Project, "DELETE", f"/projects/{quote(project, safe='')}", wait_seconds=600)

    async def make_team(self, body: TeamRequest) -> Team:
        return await self._call(Team, "POST", "/teams", body=body)

    async def teams(self) -> Items[Team]:
        return await self._call(Items[Team], "GET", "/teams")

    async def grant_cache(self, body: CacheRequest) -> CacheGrantDocument:
        return await self._call(CacheGrantDocument, "POST", "/caches", body=body)

    async def caches(self) -> Caches:
        return await self._call(Caches, "GET", "/caches")

    async def limit_cache(self, project: str, body: CacheLimit) -> ProjectCache:
        return await self._call(ProjectCache, "PATCH", f"/caches/{quote(project, safe='')}", body=body)

    async def forget_cache_volume(self, project: str, cluster: str) -> ProjectCache:
        return await self._call(ProjectCache, "DELETE", f"/caches/{quote(project, safe='')}/{quote(cluster, safe='')}")

    async def project_uses(self, project: str) -> Items[str]:
        return await self._call(Items[str], "GET", f"/caches/{quote(project, safe='')}/uses")

    async def record_cache_summary(self, project: str, cluster: str, body: CacheSummaryBody) -> TrainingCacheDirectory:
        path = f"/caches/{quote(project, safe='')}/{quote(cluster, safe='')}/summary"
        return await self._call(TrainingCacheDirectory, "PUT", path, body=body)

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """The mirror may delay its response by ``heartbeat.wait_seconds``."""
        return await self._call(
            HeartbeatReply, "POST", "/agents/heartbeat", body=heartbeat, wait_seconds=heartbeat.wait_seconds
        )

    async def run_spec(self, run: str, rank: int, *, node: str, boot_id: str, volume_id: str | None = None) -> RunSpec:
        """All that a rank needs, for the agent of its node, or for its pod, whose uid is the ``boot_id``."""
        params = {"node": node, "boot_id": boot_id} | ({} if volume_id is None else {"volume_id": volume_id})
        return await self._call(RunSpec, "GET", f"/runs/{run}/{rank}", params=params)

    async def record_run_output(self, run: str, rank: int, output: RunOutput) -> None:
        await self._request("POST", f"/runs/{run}/{rank}/logs", body=output)

    async def training_jobs(self, search: TrainingJobSearch) -> TrainingJobsAnswer:
        return await self._call(TrainingJobsAnswer, "POST", "/v1/training_jobs/search", body=search)

    async def training_log(self, project_id: str, job_id: str, query: LogQuery) -> LogPage:
        return await self._call(LogPage, "POST", f"{_job_path(project_id, job_id)}/logs", body=query)

    async def stop_training_job(self, project_id: str, job_id: str) -> TrainingJob:
        """Returns at once; the job ends once its ranks have. A job that has ended stays as it is."""
        path = f"{_job_path(project_id, job_id)}/stop"
        return (await self._call(TrainingJobAnswer, "POST", path)).training_job

    async def ask_hub(self, request: HubRequest, wait_seconds: float) -> HubAnswer:
        return await self._poll(HubAnswer, "POST", "/hub", wait_seconds, body=request)

    async def named(self, of: str) -> Named:
        return await self._call(Named, "GET", "/names", params={"of": of})

    async def events(self, params: Params) -> Page[EventDocument]:
        return await self._call(Page[EventDocument], "GET", "/events", params=params)

    async def set_secret(self, name: str, body: SecretBody) -> SecretEntry:
        return await self._call(SecretEntry, "PUT", f"/secrets/{quote(name, safe='')}", body=body)

    async def secrets(self) -> Items[SecretEntry]:
        return await self._call(Items[SecretEntry], "GET", "/secrets")

    async def rotate_secrets(self) -> SecretRotation:
        return await self._call(SecretRotation, "POST", "/secrets/rotate")

    async def remove_secret(self, name: str) -> None:
        await self._request("DELETE", f"/secrets/{quote(name, safe='')}")

    async def create_token(self, request: TokenRequest) -> NewToken:
        return await self._call(NewToken, "POST", "/tokens", body=request)

    async def tokens(self) -> Items[Token]:
        return await self._call(Items[Token], "GET", "/tokens")

    async def revoke_token(self, token_id: str) -> Token:
        return await self._call(Token, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    async def verify(self, request: VerificationRequest) -> Verification:
        return await self._call(Verification, "POST", "/verifications", body=request)

    async def verification(self, verification_id: str) -> Verification:
        """Wait at most half a minute for the verification to end."""
        return await self._poll(Verification, "GET", f"/verifications/{quote(verification_id, safe='')}", 30)

    async def collect(self, request: CollectionRequest) -> Collection:
        return await self._call(Collection, "POST", "/collections", body=request)

    async def collection(self, collection_id: str, wait_seconds: float) -> Collection:
        return await self._poll(Collection, "GET", f"/collections/{collection_id}", wait_seconds)

    async def restore(self, request: RestorationRequest) -> Items[RestoredItem]:
        return await self._call(Items[RestoredItem], "POST", "/restorations", body=request)


def _job_path(project_id: str, job_id: str) -> str:
    return f"/v1/training_projects/{quote(project_id, safe='')}/jobs/{quote(job_id, safe='')}"


class AgentClient(ServiceClient):
    async def stage(self, request: StageRequest) -> StageDocument:
        """With ``request.wait`` the response arrives when the stage is terminal."""
        return await self._call(
            StageDocument, "POST", "/stages", body=request, wait_seconds=86400 if request.wait else 0
        )

    async def stage_by_id(self, stage_id: str, wait_seconds: float = 0) -> StageDocument:
        return await self._poll(StageDocument, "GET", f"/stages/{stage_id}", wait_seconds)

    def follow(
        self, stage_id: str, interval_seconds: float = 0.5, outages: OutageRetry | None = None
    ) -> AsyncIterator[StageDocument]:
        look = partial(self.stage_by_id, stage_id, interval_seconds)
        return (outages or OutageRetry()).follow(look, lambda stage: stage.state in STAGE_TERMINAL)

    async def check_pull(self, request: PullCheck) -> PullLosses:
        """Comparing a large manifest with existing files takes minutes."""
        return await self._call(PullLosses, "POST", "/pulls/checks", body=request, wait_seconds=600)

    async def pull(self, request: PullRequest) -> StageDocument:
        return await self._call(StageDocument, "POST", "/pulls", body=request, wait_seconds=600)

    async def stages(self) -> Items[StageDocument]:
        return await self._call(Items[StageDocument], "GET", "/stages")

    async def unstage(self, stage_id: str) -> StageDocument:
        return await self._call(StageDocument, "DELETE", f"/stages/{stage_id}", wait_seconds=60)

    async def make_volume(self, request: JobVolumeRequest) -> JobVolume:
        """Evicting other content for it may take minutes."""
        return await self._call(JobVolume, "POST", "/job-volumes", body=request, wait_seconds=600)

    async def volumes(self) -> Items[JobVolume]:
        return await self._call(Items[JobVolume], "GET", "/job-volumes")

    async def volume(self, volume_id: str, wait_seconds: float = 0) -> JobVolume:
        return await self._poll(JobVolume, "GET", f"/job-volumes/{quote(volume_id, safe='')}", wait_seconds)

    async def end_volume(self, volume_id: str) -> JobVolume:
        return await self._call(JobVolume, "DELETE", f"/job-volumes/{quote(volume_id, safe='')}", wait_seconds=60)

    async def verify(self, request: PathVerificationRequest) -> PathVerification:
        """The response arrives when everything was read, however long that takes."""
        return await self._call(PathVerification, "POST", "/verifications", body=request, wait_seconds=7 * 24 * 3600)

    async def shared_caches(self) -> SharedCachesDocument:
        return await self._call(SharedCachesDocument, "GET", "/shared-caches")

    async def summarize_cache(self, request: SummaryRequest) -> CacheSummaryDocument:
        """The response arrives when the whole cache was walked."""
        return await self._call(
            CacheSummaryDocument, "POST", "/shared-caches/summary", body=request, wait_seconds=24 * 3600
        )

    async def remove_from_cache(self, request: RemovalRequest) -> Removal:
        return await self._call(Removal, "POST", "/shared-caches/removals", body=request, wait_seconds=60)

    async def events(self, params: Params) -> NodeEvents:
        return await self._call(NodeEvents, "GET", "/events", params=params)

    async def cache(self) -> Cache:
        return await self._call(Cache, "GET", "/cache")
