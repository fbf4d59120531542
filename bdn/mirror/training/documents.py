"""Documents of training jobs, from their rows."""

from bdn.core.training.states import ACTIVE, slowest
from bdn.mirror.db.tables import ProjectRow, TrainingJobRow
from bdn.mirror.db.training import JobState
from bdn.mirror.training.steps import job_of
from bdn.wire.job_schema import SyncStatus
from bdn.wire.shapes import moment
from bdn.wire.training_schema import (
    PREFIX,
    InstanceType,
    OwnFields,
    ProjectName,
    RankDocument,
    TrainingJob,
    TrainingJobSpec,
    TrainingProject,
)


def spec_of(row: TrainingJobRow) -> TrainingJobSpec:
    return TrainingJobSpec.model_validate(row.request)


def job_document(state: JobState) -> TrainingJob:
    row, spec, job = state.row, spec_of(state.row), job_of(state.row)
    ranks = [
        RankDocument.model_validate({"rank": number, **record})
        for number, record in enumerate(row.ranks)
        if record["node"]  # a pod has none before Kubernetes has placed it
    ]
    return TrainingJob(
        id=row.id,
        created_at=moment(row.created_at),
        updated_at=moment(row.updated_at),
        current_status=f"{PREFIX}{row.status}",
        error_message=str(job.failure) if job.failure else row.waiting_for,
        instance_type=InstanceType.of(spec.compute),
        node_count=spec.compute.demand.nodes,
        training_project_id=state.project.id,
        training_project=ProjectName(id=state.project.id, name=state.project.name),
        name=row.name,
        checkpoint_sync_status=_sync_status(row) if spec.runtime.checkpointing else None,
        priority=row.priority,
        availability_model=row.availability_model,
        bdn=OwnFields(
            mirror_id=row.mirror_id,
            cluster=row.cluster,
            waiting_for=row.waiting_for,
            stopping=row.is_stopping and row.status in ACTIVE,
            ranks=ranks,
            slowest_rank=slowest(job.ranks) if row.status == "DEPLOYING" else None,
        ),
    )


def _sync_status(row: TrainingJobRow) -> SyncStatus | None:
    reported = {record.get("sync_status") for record in row.ranks}
    if "SYNCING" in reported:
        return "SYNCING"
    return "COMPLETED" if reported == {"COMPLETED"} else None


def project_document(project: ProjectRow, latest: TrainingJobRow | None) -> TrainingProject:
    return TrainingProject(
        id=project.id,
        name=project.name,
        created_at=moment(project.created_at),
        updated_at=moment(max(project.created_at, latest.updated_at if latest else 0.0)),
        team_name=project.team,
        latest_job=job_document(JobState(latest, project)) if latest else None,
    )
