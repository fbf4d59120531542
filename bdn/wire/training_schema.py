"""Training jobs: requests of clients of ``/v1``, which grow, and the documents that these clients parse.

A request has unset fields as null. Unknown fields are accepted, and ``unknown_fields`` names them.
"""

from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    StrictStr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bdn.core.errors import InvalidRequestError, NotSupportedError
from bdn.core.source.uri import WeightsSource, normalise_mount
from bdn.core.training.environment import CACHES, CHECKPOINTS, LOADED, WORKSPACE, JobPlaces, check_places, is_variable
from bdn.core.training.placement import Demand
from bdn.core.training.states import RankState
from bdn.core.units import parse_size
from bdn.wire.mirror_schema import SOURCES_LIMIT, WeightsSourceBody
from bdn.wire.shapes import MOST_FIELDS, ErrorBody, check_json_size

PREFIX: Final = "TRAINING_JOB_"
JOBS_AT_ONCE: Final = 1000  # the newest, of a list or search
LINES_AT_ONCE: Final = 1000  # of a page of logs with a limit
_OPAQUE_BYTES: Final = 256 * 1024  # of JSON that is stored without effect
_NAMED: Final = 20  # unknown fields
_LONGEST_FIELD: Final = 100
_GIB: Final = 1024**3

_Line = Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
_Text = Annotated[StrictStr, Field(max_length=128 * 1024, pattern=r"^[^\x00]*$")]
_Path = Annotated[StrictStr, Field(min_length=1, max_length=4096)]


_Opaque = Annotated[
    Any,
    Field(json_schema_extra={"x-max-bytes": _OPAQUE_BYTES}),
    AfterValidator(partial(check_json_size, limit=_OPAQUE_BYTES)),
]


class GrowingModel(BaseModel):
    """A request that accepts unknown fields, drops their values, and names them in ``unknown_fields``."""

    model_config = ConfigDict(extra="ignore")
    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401 - any JSON
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise PydanticCustomError("too_many_fields", "has more than {most} fields", {"most": MOST_FIELDS})
        made = handler(value)
        if isinstance(value, dict):
            made._unknown = tuple(  # noqa: SLF001 - its own class
                str(name)[:_LONGEST_FIELD]
                for name, given in value.items()
                if name not in cls.model_fields and given is not None
            )
        return made

    def unknown_fields(self) -> list[str]:
        """Their paths, such as ``compute.shape``, sorted; at most 20."""
        return sorted(self._found())[:_NAMED]

    def _found(self) -> Iterator[str]:
        yield from self._unknown
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), GrowingModel):
                yield from (f"{name}.{one}" for one in value._found())  # noqa: SLF001 - its own class


class SecretReference(GrowingModel):
    """The name of a secret of the organisation."""

    name: _Line


class SecretRef(GrowingModel):
    secret_ref: SecretReference


class DockerAuth(GrowingModel):
    """How to sign in to the image's registry: REGISTRY_SECRET, or the fields of another method, which are refused."""

    auth_method: _Line
    registry: _Line | None = None
    registry_secret_docker_auth: SecretRef | None = None

    def check(self) -> None:
        if self.auth_method != "REGISTRY_SECRET":
            raise NotSupportedError(f"docker_auth with auth_method {self.auth_method!r}", "use REGISTRY_SECRET")
        if self.registry is None or self.registry_secret_docker_auth is None:
            raise InvalidRequestError("docker_auth REGISTRY_SECRET needs registry and registry_secret_docker_auth")


class Image(GrowingModel):
    base_image: _Path | None = None
    docker_auth: DockerAuth | None = None

    def check(self) -> None:
        if (self.base_image or "").startswith("-"):  # container engines would read it as an option
            raise InvalidRequestError(f"image.base_image {self.base_image!r} begins with '-': name an image")
        if self.docker_auth is not None:
            self.docker_auth.check()


class Accelerator(GrowingModel):
    accelerator: _Line | None = None
    count: Annotated[int, Field(ge=0, le=1024)] | None = None  # null: 1


def _bytes_of(value: object) -> object:
    if isinstance(value, str):
        parse_size(value)
    return value


class Compute(GrowingModel):
    """What each node needs. ``cpu_count`` and ``memory`` are limits; null: none."""

    node_count: Annotated[int, Field(ge=1, le=1000)] | None = None
    cpu_count: Annotated[int, Field(ge=1, le=65536)] | None = None
    memory: Annotated[Annotated[StrictStr, Field(max_length=64)] | None, BeforeValidator(_bytes_of)] = None
    accelerator: Accelerator | None = None
    availability_model: _Line | None = None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)

    @property
    def demand(self) -> Demand:
        one = self.accelerator
        if one is None or one.accelerator is None or one.count == 0:
            return Demand(self.node_count or 1)
        return Demand(self.node_count or 1, one.accelerator, one.count or 1)


class CheckpointingConfig(GrowingModel):
    enabled: StrictBool | None = None
    checkpoint_path: _Path | None = None
    volume_size_gib: Annotated[int, Field(ge=1, le=10**6)] | None = None

    @property
    def size_bytes(self) -> int | None:
        return None if self.volume_size_gib is None else self.volume_size_gib * _GIB


class LoadedCheckpoint(GrowingModel):
    """``baseten_latest_checkpoint`` of a job or of a project, or ``baseten_named_checkpoint`` of a job."""

    typ: _Line
    job_id: _Line | None = None
    project_name: _Line | None = None
    checkpoint_name: Annotated[StrictStr, Field(min_length=1, max_length=255)] | None = None

    def check(self) -> None:
        if self.typ == "loops_checkpoint":
            raise NotSupportedError("loading a checkpoint of Loops", "name a checkpoint of a training job")
        if self.typ not in ("baseten_latest_checkpoint", "baseten_named_checkpoint"):
            raise InvalidRequestError(
                f"checkpoints: typ {self.typ!r} is not baseten_latest_checkpoint or baseten_named_checkpoint"
            )
        if self.typ == "baseten_named_checkpoint" and not (self.job_id and self.checkpoint_name):
            raise InvalidRequestError("checkpoints: baseten_named_checkpoint needs job_id and checkpoint_name")


class LoadCheckpointConfig(GrowingModel):
    enabled: StrictBool | None = None
    download_folder: _Path | None = None
    checkpoints: Annotated[list[LoadedCheckpoint], Field(max_length=100, fail_fast=True)] | None = None


class CacheConfig(GrowingModel):
    enabled: StrictBool | None = None
    enable_legacy_hf_mount: StrictBool | None = None
    enable_legacy_hf_cache: StrictBool | None = None  # the same, as HTTP clients write it
    require_cache_affinity: StrictBool | None = None
    mount_base_path: _Path | None = None


class Artifact(GrowingModel):
    s3_bucket: _Line | None = None
    s3_key: Annotated[StrictStr, Field(min_length=1, max_length=1024)]


class Runtime(GrowingModel):
    start_commands: Annotated[list[_Text], Field(max_length=1000, fail_fast=True)] | None = None
    environment_variables: Annotated[dict[_Line, _Text | SecretReference], Field(max_length=1000)] | None = None
    checkpointing_config: CheckpointingConfig | None = None
    load_checkpoint_config: LoadCheckpointConfig | None = None
    cache_config: CacheConfig | None = None
    enable_cache: StrictBool | None = None
    artifacts: Annotated[list[Artifact], Field(max_length=100, fail_fast=True)] | None = None

    @property
    def checkpointing(self) -> CheckpointingConfig | None:
        one = self.checkpointing_config
        return one if one is not None and one.enabled else None

    @property
    def loading(self) -> LoadCheckpointConfig | None:
        one = self.load_checkpoint_config
        return one if one is not None and one.enabled and one.checkpoints else None

    @property
    def cache(self) -> CacheConfig | None:
        """``enable_cache`` alone means the cache and the mount of the project's Hugging Face folder."""
        one = self.cache_config
        if one is not None and one.enabled:
            return one
        return CacheConfig(enabled=True, enable_legacy_hf_mount=True) if self.enable_cache else None

    @property
    def plain(self) -> dict[str, str]:
        return {name: value for name, value in (self.environment_variables or {}).items() if isinstance(value, str)}

    @property
    def secrets(self) -> dict[str, str]:
        given = (self.environment_variables or {}).items()
        return {name: value.name for name, value in given if isinstance(value, SecretReference)}


def _or_empty(value: object) -> object:
    return {} if value is None else value


class TrainingJobSpec(GrowingModel):
    """A training job as clients request it. Without effect: the three fields of type JSON, and ``availability_model``."""

    image: Image | None = None
    compute: Annotated[Compute, BeforeValidator(_or_empty)] = Field(default_factory=Compute)
    runtime: Annotated[Runtime, BeforeValidator(_or_empty)] = Field(default_factory=Runtime)
    interactive_session: _Opaque = None
    name: _Line | None = None
    priority: Annotated[int, Field(ge=-(10**6), le=10**6)] | None = None
    workspace: _Opaque = None
    weights: Annotated[list[WeightsSourceBody], Field(max_length=10_000, fail_fast=True)] | None = None
    enable_baseten_workdir: StrictBool | None = None
    truss_user_env: _Opaque = None

    @property
    def places(self) -> JobPlaces:
        """The job's directories with normalised paths. Raises ``InvalidMountError``."""
        runtime = self.runtime
        cache, loading, checkpointing = runtime.cache, runtime.loading, runtime.checkpointing
        return JobPlaces(
            working=None if self.enable_baseten_workdir is False else WORKSPACE,
            checkpoints=None
            if checkpointing is None
            else normalise_mount(checkpointing.checkpoint_path or CHECKPOINTS),
            loaded=None if loading is None else normalise_mount(loading.download_folder or LOADED),
            caches=None if cache is None else normalise_mount(cache.mount_base_path or CACHES),
            huggingface=bool(cache and (cache.enable_legacy_hf_mount or cache.enable_legacy_hf_cache)),
        )

    @property
    def login_secret(self) -> tuple[str, str] | None:
        """The image's registry, and the name of the secret with its login."""
        auth = self.image.docker_auth if self.image is not None else None
        if auth is None or auth.registry is None or auth.registry_secret_docker_auth is None:
            return None
        return auth.registry, auth.registry_secret_docker_auth.secret_ref.name

    @property
    def secret_names(self) -> list[str]:
        login = self.login_secret
        return sorted({*self.runtime.secrets.values(), *([login[1]] if login else [])})

    def sources(self) -> list[WeightsSource]:
        """The weights to mirror. Raises ``CallerError`` for an invalid or a surplus one."""
        if len(self.weights or ()) > SOURCES_LIMIT:
            raise InvalidRequestError(
                f"{len(self.weights or ())} sources are too many for one job; the limit is {SOURCES_LIMIT}"
            )
        return [body.to_core() for body in self.weights or ()]

    def check(self) -> None:
        """Reject what is wrong in the request itself. Raises ``CallerError``."""
        if not any(command.strip() for command in self.runtime.start_commands or ()):
            raise InvalidRequestError("runtime.start_commands is empty: name the commands that the job runs")
        if wrong := [name for name in self.runtime.environment_variables or {} if not is_variable(name)]:
            raise InvalidRequestError(f"environment_variables: no shell accepts the name {wrong[0]!r}")
        if self.image is not None:
            self.image.check()
        for checkpoint in (self.runtime.loading and self.runtime.loading.checkpoints) or ():
            checkpoint.check()
        if len(self.runtime.artifacts or ()) > 1:
            raise InvalidRequestError("runtime.artifacts: a job has one archive")
        check_places(self.places, [source.mount_location for source in self.sources()])


_SPEC_EXAMPLE: Final[dict[str, JsonValue]] = {
    "image": {"base_image": "python:3.12"},
    "compute": {"node_count": 1, "accelerator": {"accelerator": "H200", "count": 8}},
    "runtime": {"start_commands": ["python train.py"], "environment_variables": {"HF_TOKEN": {"name": "hf_token"}}},
    "weights": [{"source": "hf://org/model@main", "mount_location": "/app/models/model"}],
}


class TrainingJobRequest(GrowingModel, json_schema_extra={"examples": [{"training_job": _SPEC_EXAMPLE}]}):
    training_job: TrainingJobSpec


class TrainingJobPatch(GrowingModel, json_schema_extra={"examples": [{"priority": 5}]}):
    """Null fields stay as they are. ``availability_model`` is stored without effect."""

    priority: Annotated[int, Field(ge=-(10**6), le=10**6)] | None = None
    availability_model: _Line | None = None


class SearchOrder(GrowingModel):
    field: Literal["created_at"] = "created_at"
    order: Literal["asc", "desc"] = "desc"


class TrainingJobSearch(GrowingModel, json_schema_extra={"examples": [{"statuses": ["TRAINING_JOB_RUNNING"]}]}):
    """Null fields do not filter. A status that no job has is accepted."""

    statuses: Annotated[list[_Line], Field(max_length=100, fail_fast=True)] | None = None
    project_id: _Line | None = None
    job_id: _Line | None = None
    order_by: Annotated[list[SearchOrder], Field(max_length=10, fail_fast=True)] | None = None

    @property
    def is_ascending(self) -> bool:
        return [one.order for one in self.order_by or ()][:1] == ["asc"]


_Millis = Annotated[int, Field(ge=0, lt=2**53)]


class LogQuery(GrowingModel, json_schema_extra={"examples": [{"limit": 1000, "direction": "asc"}]}):
    """A window of a job's log, both ends inclusive. Without ``limit`` all of it, or its newest 4 MB."""

    start_epoch_millis: _Millis | None = None
    end_epoch_millis: _Millis | None = None
    direction: Literal["asc", "desc"] | None = None
    limit: Annotated[int, Field(ge=1, le=LINES_AT_ONCE)] | None = None
    min_level: Annotated[_Line | None, Field(description="without effect")] = None


class LogLine(BaseModel):
    """``timestamp`` is in nanoseconds since the epoch. ``replica`` is ``r<rank>``, null for lines of the mirror."""

    timestamp: str
    message: str
    replica: str | None
    request_id: str | None = None
    level: str | None = None


class LogPage(BaseModel):
    logs: list[LogLine]


class InstanceType(BaseModel):
    """What each node of a job has; 0: no limit was requested."""

    id: str
    name: str
    memory_limit_mib: int
    millicpu_limit: int
    gpu_count: int
    gpu_type: str | None
    gpu_memory_limit_mib: int | None = None

    @classmethod
    def of(cls, compute: Compute) -> Self:
        demand = compute.demand
        name = f"{demand.gpu_type}:{demand.gpus}" if demand.gpus else f"CPU:{compute.cpu_count or 1}"
        return cls(
            id=name,
            name=name,
            memory_limit_mib=(compute.memory_bytes or 0) // 1024**2,
            millicpu_limit=1000 * (compute.cpu_count or 0),
            gpu_count=demand.gpus,
            gpu_type=demand.gpu_type,
        )


class ProjectName(BaseModel):
    id: str
    name: str


class User(BaseModel):
    """The user of a job: always without an address, because tokens have no users."""

    email: str | None = None


class RankDocument(BaseModel):
    """``reported_at``: when a report last changed it. ``scratch_bytes``: of its scratch in use, as last reported."""

    rank: int
    node: str
    state: RankState
    bytes_done: int = 0
    bytes_total: int | None = None
    eta_seconds: float | None = None
    exit_code: int | None = None
    error: ErrorBody | None = None
    scratch_bytes: int | None = None
    scratch_limit_bytes: int | None = None
    reported_at: datetime | None = None


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


class TrainingJobAnswer(BaseModel):
    training_job: TrainingJob


class ProjectJobAnswer(BaseModel):
    training_project: TrainingProject
    training_job: TrainingJob


class ProjectJobsAnswer(BaseModel):
    training_project: TrainingProject
    training_jobs: list[TrainingJob]


class TrainingJobsAnswer(BaseModel):
    training_jobs: list[TrainingJob]


class DeletedJob(BaseModel):
    id: str
    deleted: Literal[True] = True
    training_project_id: str
