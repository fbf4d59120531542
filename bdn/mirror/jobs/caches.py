"""Training caches: grants to mount them, pinning to a cluster, sizes and summaries, removal.

Agents create the caches, as directories on volumes that the nodes of a cluster share. A project is pinned to the
cluster for which its first cache was requested.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import CacheAffinityError, CacheNotSharedError, CacheOverQuotaError, NotFoundError
from bdn.core.training.affinity import place
from bdn.core.training.cache_layout import HUGGINGFACE, USER_ARTIFACTS, project_folder, team_folder
from bdn.mirror.db import caches, operations, projects
from bdn.mirror.db.caches import CacheState
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.operations import ANY
from bdn.mirror.db.tables import OperationPartRow, OperationRow, ProjectRow
from bdn.mirror.operations.operations import CACHE_REMOVAL
from bdn.wire.access_schema import DEFAULT_TEAM
from bdn.wire.cache_schema import (
    CacheGrantDocument,
    CacheLimit,
    CacheRemoval,
    CacheRequest,
    Caches,
    CacheSummaryBody,
    CacheSummaryDocument,
    ProjectCache,
    RemoveCacheCommand,
    TrainingCacheDirectory,
    unpack,
)
from bdn.wire.grants import CacheGrant, GrantSigner
from bdn.wire.job_schema import CacheFolders
from bdn.wire.shapes import moment

GRANT_SECONDS: Final = 900.0  # within which the granted node must open the directories


@dataclass(frozen=True)
class TrainingCaches:
    """The service behind ``/caches``. ``limit_bytes`` applies to projects without a limit of their own."""

    database: Database
    signer: GrantSigner
    limit_bytes: int

    async def grant(self, body: CacheRequest, organisation: str, team: str | None) -> CacheGrantDocument:
        """Let a node of the cluster mount the project's caches. Creates and pins the project if necessary.

        Raises:
            InvalidRequestError: several teams have a project of this name.
            CacheAffinityError: the job must run in another cluster.
            CacheNotSharedError: the project's cache in this cluster is on another volume.
            CacheOverQuotaError: the cache exceeds its limit.
        """
        async with self.database.write() as session:
            now = self.database.now()
            row = await projects.find(session, organisation, body.project, team)
            if row is None:
                row = await projects.project(session, organisation, team or DEFAULT_TEAM, body.project, now)
            row = await caches.pin(session, row, body.cluster, now)
            project, team_id = row.id, str(row.cache_team)
            _check_place(body, str(row.cache_cluster))
            volume = await caches.volume(session, project, body.cluster, body.volume_id, now)
            if volume != body.volume_id:
                raise CacheNotSharedError(body.cluster, volume, body.volume_id)
            held = await caches.directory(session, project, body.cluster)
            limit = self._limit(row)
            if held is not None and (held.size_bytes or 0) > limit:
                raise CacheOverQuotaError(body.project, held.size_bytes or 0, limit)
        grant = CacheGrant(organisation, project, team_id, body.cluster, volume, now + GRANT_SECONDS)
        return CacheGrantDocument(
            grant=self.signer.sign(grant),
            project_id=project,
            team_id=team_id,
            cluster=body.cluster,
            expires_at=moment(grant.expires_at),
        )

    async def folders(self, project: str, cluster: str) -> CacheFolders:
        """The paths of a project's caches on a volume, for pods of the cluster. Pins the project if necessary.

        Raises ``CacheOverQuotaError``. Which volume it is, and what is on it, agents alone report.
        """
        async with self.database.write() as session:
            row = await session.get_one(ProjectRow, project)
            row = await caches.pin(session, row, cluster, self.database.now())
            held, limit = await caches.directory(session, project, cluster), self._limit(row)
        if held is not None and (held.size_bytes or 0) > limit:
            raise CacheOverQuotaError(row.name, held.size_bytes or 0, limit)
        own = project_folder(row.organisation, project)
        return CacheFolders(
            project_id=project,
            project=f"{own}/{USER_ARTIFACTS}",
            team=team_folder(row.organisation, str(row.cache_team)),
            huggingface=f"{own}/{HUGGINGFACE}",
        )

    async def record(self, project: str, cluster: str, body: CacheSummaryBody) -> TrainingCacheDirectory:
        """Store an agent's summary, unless a later one is stored.

        Raises ``InvalidRequestError``; ``NotFoundError`` if the project has no cache on this volume of the cluster.
        """
        await asyncio.to_thread(unpack, body.packed)
        captured_at = min(body.timestamp.timestamp(), self.database.now())  # later summaries must replace it
        async with self.database.write() as session:
            row = await caches.directory(session, project, cluster)
            if row is None or row.volume != body.volume_id:
                raise NotFoundError(f"a cache of project {project} in cluster {cluster}")
            held = {"size_bytes": body.size_bytes, "files": body.files, "packed": body.packed}
            await caches.record(session, project, cluster, captured_at, **held)
        return TrainingCacheDirectory(
            cluster=cluster,
            volume_id=row.volume,
            size_bytes=body.size_bytes,
            files=body.files,
            captured_at=moment(captured_at),
        )

    async def listed(self, organisation: str, team: str | None) -> Caches:
        """All caches of an organisation or team, and unfinished removals of deleted projects' caches."""
        async with self.database.read() as session:
            found = await caches.listed(session, organisation, team)
            left = await caches.removals(session, organisation)
        removals = [_removal(*one) for one in left if team in (None, one[0].request["team"])]
        return Caches(items=[self._document(one) for one in found], removals=removals)

    async def summary(self, organisation: str, team: str | None, project: str) -> CacheSummaryDocument:
        """The newest summary from the pinned cluster; an empty one if there is none.

        ``NotFoundError``: no such project.
        """
        async with self.database.read() as session:
            row = await projects.find(session, organisation, project, team)
            if row is None:
                raise NotFoundError(f"project {project!r}")
            held = row.cache_cluster and await caches.directory(session, row.id, row.cache_cluster)
        if not held or held.packed is None or held.captured_at is None:
            return CacheSummaryDocument(timestamp=moment(self.database.now()), project_id=row.id, file_summaries=[])
        files = await asyncio.to_thread(unpack, held.packed)
        return CacheSummaryDocument(timestamp=moment(held.captured_at), project_id=held.project, file_summaries=files)

    async def limit(self, organisation: str, project: str, body: CacheLimit) -> ProjectCache:
        """Limit the size of a project's cache. Raises ``NotFoundError`` if there is none."""
        async with self.database.write() as session:
            pin = await _pinned(session, organisation, project)
            pin.cache_limit_bytes = body.limit_bytes
        return await self._one(organisation, pin)

    async def forget_volume(self, organisation: str, project: str, cluster: str) -> ProjectCache:
        """Detach the cache from its volume: the next job's node decides the new volume. Data on the old volume stays.

        Raises ``NotFoundError`` if the project has no cache in this cluster.
        """
        async with self.database.write() as session:
            pin = await _pinned(session, organisation, project)
            if not await caches.forget_directory(session, pin.id, cluster):
                raise NotFoundError(f"a training cache of project {project} in cluster {cluster}")
        return await self._one(organisation, pin)

    async def _one(self, organisation: str, pin: ProjectRow) -> ProjectCache:
        return next(one for one in (await self.listed(organisation, None)).items if one.project_id == pin.id)

    def _limit(self, pin: ProjectRow) -> int:
        return self.limit_bytes if pin.cache_limit_bytes is None else pin.cache_limit_bytes

    def _document(self, state: CacheState) -> ProjectCache:
        directories = [
            TrainingCacheDirectory(
                cluster=row.cluster,
                volume_id=row.volume,
                size_bytes=row.size_bytes,
                files=row.files,
                captured_at=None if row.captured_at is None else moment(row.captured_at),
            )
            for row in state.directories
        ]
        return ProjectCache(
            project_id=state.project.id,
            project_name=state.project.name,
            team_id=str(state.project.cache_team),
            cluster=str(state.project.cache_cluster),
            limit_bytes=self._limit(state.project),
            directories=directories,
        )


async def forget_caches(session: WriteSession, project: ProjectRow, now: float) -> None:
    """Record the removal of a project's caches, in the transaction that deletes the project afterwards.

    In each cluster, the next agent with the volume removes the cache, once no agent has it mounted: a mount that was
    granted before may be reported while this transaction commits.
    """
    for row in await caches.forget(session, project.id):
        operation_id = CACHE_REMOVAL.new_id()
        command = RemoveCacheCommand(
            id=operation_id, organisation=project.organisation, project=project.id, volume_id=row.volume
        )
        await operations.insert(
            session,
            operation_id,
            CACHE_REMOVAL.name,
            {(row.cluster, ANY): "PENDING"},
            now,
            organisation=project.organisation,
            request={"project": project.id, "team": project.team, "cluster": row.cluster},
            command=command.model_dump(),
        )


async def _pinned(session: ReadSession, organisation: str, project: str) -> ProjectRow:
    row = await projects.find(session, organisation, project)
    if row is None or row.cache_cluster is None:
        raise NotFoundError(f"a training cache of project {project}")
    return row


def _check_place(body: CacheRequest, pinned: str) -> None:
    """Raises ``CacheAffinityError`` if the job must run in another cluster than the requesting node's."""
    offering = {body.cluster, *(body.offered_in or ())} | ({pinned} if body.gpu_type is None else set())
    cluster = place(
        body.project,
        pinned=pinned,
        offering=offering,
        asking=body.cluster,
        gpu_type=body.gpu_type,
        require_cache_affinity=body.require_cache_affinity,
    )
    if cluster != body.cluster:
        raise CacheAffinityError(body.project, cluster, body.gpu_type, is_offered=True)


def _removal(row: OperationRow, part: OperationPartRow) -> CacheRemoval:
    return CacheRemoval.model_validate(
        {
            "id": row.id,
            "project_id": row.request["project"],
            "cluster": row.request["cluster"],
            "asked_at": moment(row.created_at),
            "state": part.state,
            "error": part.error,
        }
    )
