"""Documents of ``/v1`` about everything but jobs, as clients of Baseten read them. Requests ignore unknown fields."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StrictStr
from pydantic_core import PydanticCustomError

from bdn.core.training.checkpoints import CheckpointType
from bdn.wire.access_schema import LIMIT_VALUE_BYTES, NAME_PATTERN, TeamName
from bdn.wire.training_schema import TrainingJob, TrainingProject

_MILLIS = Annotated[int, Field(ge=0, lt=2**53)]


def _check_title(name: str) -> str:
    if not name.isprintable() or name != name.strip():
        raise PydanticCustomError("not_a_title", "has unprintable characters, or spaces at an end")
    return name


# Sources name such a project by its id: ``bt://`` has fewer characters.
ProjectTitle = Annotated[StrictStr, Field(min_length=1, max_length=128), AfterValidator(_check_title)]


class NewTrainingProject(BaseModel):
    """``team_name`` is ignored where the path names a team."""

    name: ProjectTitle
    team_name: TeamName | None = None


class TrainingProjectRequest(BaseModel, json_schema_extra={"examples": [{"training_project": {"name": "tune"}}]}):
    """A project to create, unless the team has one of this name."""

    training_project: NewTrainingProject


class TrainingProjectAnswer(BaseModel):
    training_project: TrainingProject


class TrainingProjectsAnswer(BaseModel):
    training_projects: list[TrainingProject]


class DeletedProject(BaseModel):
    id: str
    deleted: Literal[True] = True


class SecretUpsert(BaseModel, json_schema_extra={"examples": [{"name": "hf_token", "value": "hf_example"}]}):
    """A secret of the organisation to create, or its next value."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: Annotated[StrictStr, Field(pattern=f"^{NAME_PATTERN}$")]
    value: Annotated[StrictStr, Field(max_length=LIMIT_VALUE_BYTES, repr=False)]


class NamedSecret(BaseModel):
    """A secret without its value. The id depends on the name alone, so a new value keeps it."""

    id: str
    created_at: datetime
    name: str
    team_name: str


class NamedSecrets(BaseModel):
    secrets: list[NamedSecret]


class DeletedSecret(BaseModel):
    name: str


class TeamDocument(BaseModel):
    id: str
    name: str
    default: bool
    created_at: datetime


class TeamsAnswer(BaseModel):
    teams: list[TeamDocument]


class CapacityAnswer(BaseModel):
    """Always empty: BDN has no limits of GPU capacity."""

    gpu_capacities: Annotated[list[str], Field(max_length=0)] = []
    team_gpu_capacities: Annotated[list[str], Field(max_length=0)] = []


class AuthCodesAnswer(BaseModel):
    auth_codes: Annotated[list[str], Field(max_length=0)] = []


class JobCheckpoint(BaseModel):
    """A checkpoint of a job by its name, which is ``checkpoint_id``; ``size_bytes`` is the sum over all ranks."""

    id: str
    checkpoint_id: str
    created_at: datetime
    checkpoint_type: CheckpointType
    base_model: str | None
    lora_adapter_config: dict[str, Any] | None
    size_bytes: int
    sync_status: Literal["COMPLETE", "SYNCING"]
    training_job_id: str


class JobCheckpoints(BaseModel):
    training_job: TrainingJob
    checkpoints: list[JobCheckpoint]


class CheckpointFile(BaseModel):
    """A file of a checkpoint of rank ``node_rank``. A GET of ``url`` answers it to any client: it is a secret."""

    url: Annotated[str, Field(repr=False)]
    relative_file_name: str
    node_rank: int
    size_bytes: int
    last_modified: datetime


class CheckpointFiles(BaseModel):
    """A page; ``next_page_token`` is the offset of the next one, null on the last."""

    presigned_urls: list[CheckpointFile]
    next_page_token: int | None
    total_count: int


class ArchiveAnswer(BaseModel):
    """The address of a job's archive, a tar; empty for a job without one. It is a secret."""

    artifact_presigned_urls: Annotated[list[str], Field(repr=False)]


class Sample(BaseModel):
    timestamp: datetime
    value: float


class StorageSeries(BaseModel):
    """Use of a file system over time; ``utilization`` is the share of its limit."""

    usage_bytes: list[Sample] = []
    utilization: list[Sample] = []

    @classmethod
    def of(cls, at: datetime, used: int, limit: int) -> Self:
        share = used / limit if limit else 1.0
        return cls(usage_bytes=[Sample(timestamp=at, value=used)], utilization=[Sample(timestamp=at, value=share)])


class JobSeries(BaseModel):
    """Series of one node or of a job. BDN records none of GPUs and CPUs."""

    gpu_memory_usage_bytes: dict[str, list[Sample]] = {}
    gpu_utilization: dict[str, list[Sample]] = {}
    cpu_usage: list[Sample] = []
    cpu_memory_usage_bytes: list[Sample] = []
    ephemeral_storage: StorageSeries = StorageSeries()


class NodeSeries(BaseModel):
    node_id: str
    metrics: JobSeries


class JobMetrics(JobSeries):
    """``cache`` is the project's training cache, as of its last summary.

    ``ephemeral_storage`` of a node is its rank's scratch, as of the rank's last report.
    """

    training_job: TrainingJob
    per_node_metrics: list[NodeSeries]
    cache: StorageSeries


class MetricsQuery(BaseModel, json_schema_extra={"examples": [{"start_epoch_millis": 0}]}):
    """A window, both ends inclusive; null: no end."""

    start_epoch_millis: _MILLIS | None = None
    end_epoch_millis: _MILLIS | None = None


# --- GraphQL: the few fields that truss asks for ---

_Line = Annotated[StrictStr, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


class NamedCheckpoint(BaseModel):
    training_job_id: _Line
    checkpoint_name: Annotated[StrictStr, Field(min_length=1, max_length=255)]


class CheckpointWeights(BaseModel):
    checkpoint: NamedCheckpoint


class TemplateWeights(BaseModel):
    """Null for weights of another kind, which are refused."""

    b10_training_checkpoint_weights_source: CheckpointWeights | None = None


class TemplateVariable(BaseModel):
    """``value`` is the name of a secret if it ``is_secret_reference``."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
    value: Annotated[StrictStr, Field(max_length=64 * 1024, pattern=r"^[^\x00]*$")]
    is_secret_reference: bool = False


class TemplateStack(BaseModel):
    environment_variables: Annotated[list[TemplateVariable], Field(max_length=1000, fail_fast=True)] = []


class TemplateMetadata(BaseModel):
    oracle_name: _Line


class TemplateRequest(BaseModel):
    """The configuration of a model from checkpoints; only with ``dry_run``."""

    metadata: TemplateMetadata
    weights_sources: Annotated[list[TemplateWeights], Field(min_length=1, max_length=100, fail_fast=True)]
    inference_stack: TemplateStack = TemplateStack()
    instance_type_id: _Line
    dry_run: bool = False


class GraphqlVariables(BaseModel):
    request: TemplateRequest | None = None


class GraphqlRequest(BaseModel, json_schema_extra={"examples": [{"query": "{ teams { id name } }"}]}):
    query: Annotated[StrictStr, Field(max_length=64 * 1024)]
    variables: GraphqlVariables | None = None


class GraphqlError(BaseModel):
    message: str
    extensions: dict[Literal["code"], str]


class GraphqlAnswer(BaseModel):
    """``data`` by the names that the query gives its fields; ``errors`` is absent on success."""

    data: dict[str, JsonValue] | None
    errors: list[GraphqlError] = []
