"""What the objects of a training job are made from: its request, its mirror, its training caches and its registry's login."""

from dataclasses import dataclass

from bdn.core.errors import InvalidRequestError, NotSupportedError
from bdn.mirror.access.clusters import PodJobs
from bdn.mirror.db import training
from bdn.mirror.db.database import Database
from bdn.mirror.db.identity import database_id
from bdn.mirror.db.tables import TrainingJobRow
from bdn.mirror.jobs.caches import TrainingCaches
from bdn.mirror.training.documents import spec_of
from bdn.mirror.training.manifests import PodJob
from bdn.mirror.training.runs import JobRuns
from bdn.wire.training_schema import TrainingJobSpec


@dataclass(frozen=True)
class Describer:
    """For one cluster, whose tokens have this ``audience``."""

    cluster: str
    audience: str
    jobs: PodJobs
    database: Database
    runs: JobRuns
    caches: TrainingCaches

    async def described(self, row: TrainingJobRow, namespace: str) -> PodJob:
        """Raises ``CallerError`` for a job that cannot run as pods here."""
        async with self.database.read() as session:
            whole = await training.read(session, row.id)
            sources = await training.mirrored(session, str(row.mirror_id))
        assert whole is not None  # noqa: S101 - a job is deleted only once it has ended
        spec = spec_of(whole)
        if spec.image is None or spec.image.base_image is None:
            raise InvalidRequestError("the job names no image, which a pod needs: set image.base_image")
        return PodJob(
            run=row.id,
            owner=await database_id(self.database),
            namespace=namespace,
            audience=self.audience,
            jobs=self.jobs,
            spec=spec,
            mirror=str(row.mirror_id),
            mounts=tuple(source.mount_location for source in sources),
            caches=await self._caches(row, spec),
            login=await self.runs.login(row, spec),
        )

    async def _caches(self, row: TrainingJobRow, spec: TrainingJobSpec) -> dict[str, str]:
        """The paths of the job's training caches on the claim, by where the job sees them."""
        places = spec.places
        if spec.runtime.cache is None:
            return {}
        if self.jobs.cache_claim is None:
            where = f"cluster {self.cluster}, for which BDN_KUBERNETES has no jobs.cache_claim"
            raise NotSupportedError(f"a training cache in {where}", "disable the cache, or set the claim")
        folders = await self.caches.folders(row.project, self.cluster)
        paths = {places.project_cache: folders.project, places.team_cache: folders.team}
        if places.huggingface_cache is not None and folders.huggingface is not None:
            paths[places.huggingface_cache] = folders.huggingface
        return paths
