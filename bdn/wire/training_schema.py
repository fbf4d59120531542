"""Training jobs and their projects, as clients of ``/v1`` parse them."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from bdn.wire.run_schema import RankState
from bdn.wire.shapes import ErrorBody


class InstanceType(BaseModel):
    """What each node of a job has; 0: no limit was requested."""

    id: str
    name: str
    memory_limit_mib: int
    millicpu_limit: int
    gpu_count: int
    gpu_type: str | None
    gpu_memory_limit_mib: int | None = None


class ProjectName(BaseModel):
    id: str
    name: str


class User(BaseModel):
    """Tokens have no users."""

    email: str | None = None


class RankDocument(BaseModel):
    rank: int
    node: str
    state: RankState
    bytes_done: int = 0
    bytes_total: int | None = None
    eta_seconds: float | None = None
    exit_code: int | None = None
    error: ErrorBody | None = None


class OwnFields(BaseModel):
    """What only BDN reports. ``waiting_for``: what a PENDING job lacks. ``slowest_rank``: while ranks are STAGING."""

    mirror_id: str | None
    cluster: str | None
    waiting_for: str | None
    stopping: bool
    ranks: list[RankDocument]
    slowest_rank: int | None


class TrainingJob(BaseModel):
    id: str
    created_at: datetime
    updated_at: datetime
    current_status: str
    error_message: str | None
    instance_type: InstanceType
    node_count: int
    training_project_id: str
    training_project: ProjectName
    name: str
    checkpoint_sync_status: Literal["SYNCING", "COMPLETED"] | None
    priority: int
    availability_model: str
    user: User = User()
    bdn: OwnFields


class TrainingProject(BaseModel):
    id: str
    name: str
    created_at: datetime
    updated_at: datetime
    team_name: str
    latest_job: TrainingJob | None
