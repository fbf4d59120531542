"""Jobs and nodes as the routes of ``/v1`` beside those of jobs see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bdn.core.errors import NotFoundError
from bdn.mirror.access.access import Caller
from bdn.mirror.api.v1 import ClientApi
from bdn.wire.run_schema import NodeCapacity
from bdn.wire.training_schema import InstanceType, OwnFields, ProjectName, TrainingJob
from tests.support.mirror.service import Json, MirrorUnderTest

_NOTHING = {"mirror_id": None, "cluster": None, "waiting_for": None, "stopping": False}


@dataclass
class FakeTraining:
    jobs: list[TrainingJob] = field(default_factory=list)
    nodes: list[NodeCapacity] = field(default_factory=list)

    async def job(self, _: Caller, project_id: str, job_id: str) -> TrainingJob:
        for one in self.jobs:
            if (one.training_project_id, one.id) == (project_id, job_id):
                return one
        raise NotFoundError(f"training job {job_id!r}")

    async def latest_jobs(self, _: Caller, project_ids: Sequence[str]) -> Mapping[str, TrainingJob]:
        known = [one for one in self.jobs if one.training_project_id in project_ids]
        return {one.training_project_id: one for one in sorted(known, key=lambda one: one.created_at)}

    async def capacities(self) -> Sequence[NodeCapacity]:
        return self.nodes

    def add(self, project: Json, job_id: str, **fields: object) -> TrainingJob:
        """A job of a project, as ``/v1`` answered the project."""
        at = {"created_at": "2026-11-28T05:30:00Z", "updated_at": "2026-11-28T05:31:00Z"}
        made = TrainingJob.model_validate(
            {
                **at,
                "id": job_id,
                "name": job_id,
                "current_status": "TRAINING_JOB_COMPLETED",
                "error_message": None,
                "instance_type": InstanceType(
                    id="CPU:1", name="CPU:1", memory_limit_mib=0, millicpu_limit=0, gpu_count=0, gpu_type=None
                ),
                "node_count": 1,
                "training_project_id": project["id"],
                "training_project": ProjectName(id=project["id"], name=project["name"]),
                "checkpoint_sync_status": None,
                "priority": 0,
                "availability_model": "dedicated",
                "bdn": OwnFields.model_validate({**_NOTHING, "ranks": [], "slowest_rank": None}),
                **fields,
            }
        )
        self.jobs = [one for one in self.jobs if one.id != job_id] + [made]
        return made


def with_training(mirror: MirrorUnderTest) -> FakeTraining:
    """The mirror's routes ask this one from now on."""
    provided = mirror.service.api.state.provided
    training = FakeTraining()
    provided[ClientApi] = replace(provided[ClientApi], training=training)
    return training


def node(gpu_type: str | None = None, gpus: int = 0, cpus: int = 16, gib: int = 64) -> NodeCapacity:
    return NodeCapacity(gpu_type=gpu_type, gpus=gpus, cpus=cpus, memory_bytes=gib * 1024**3, slots=1, launcher="bwrap")
