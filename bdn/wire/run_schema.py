"""Runs of training jobs on nodes: what an agent reads, is commanded and reports about a rank, and its output."""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr

from bdn.core.training.states import RankState, Want
from bdn.wire.job_schema import SyncStatus
from bdn.wire.shapes import ErrorBody, Number, Quantity, StrictModel

LauncherName = Literal["podman", "docker", "bwrap"]
LINES_AT_ONCE: Final = 1000
LONGEST_LINE: Final = 64 * 1024  # bytes of UTF-8; an agent splits longer lines
LOG_BYTES: Final = 100 * 1000**2  # of one job, whose oldest lines are dropped beyond that
LINE_BYTES: Final = 25  # of a line in a log, beside its text: time and punctuation

RunId = Annotated[StrictStr, Field(pattern=r"^[a-z0-9]{10}$")]  # also the job's id
Rank = Annotated[StrictInt, Field(ge=0, lt=1000)]


class NodeCapacity(BaseModel):
    """What a node has for training jobs. ``slots``: how many jobs without GPUs it runs at a time."""

    gpu_type: Annotated[str, Field(max_length=128)] | None
    gpus: Annotated[int, Field(ge=0, le=1024)]
    cpus: Annotated[int, Field(ge=1, le=65536)]
    memory_bytes: Quantity
    slots: Annotated[int, Field(ge=0, le=1000)]
    launcher: LauncherName


_RUN: Final = "run"


def is_run(command: str) -> bool:
    """Whether a command of this id is about a run."""
    return command.startswith(f"{_RUN}:")


class RunCommand(BaseModel):
    """The mirror's command to an agent about one rank, with the id ``run:<run>:<rank>:<want>``.

    ``stage``: prepare the rank up to its first command; answered once it is STAGED or ENDED. ``go``: start the
    commands; ``stop``: end the rank; both answered once it is ENDED or LOST. Until then reports are ``running``.
    """

    run: RunId
    rank: Rank
    want: Want

    @property
    def id(self) -> str:
        return f"{_RUN}:{self.run}:{self.rank}:{self.want}"

    @classmethod
    def of(cls, command: str) -> "RunCommand | None":
        """The command of this id; None if the id is not about a run."""
        _, run, rank, want = (*command.split(":"), "", "", "")[:4]
        try:
            return cls.model_validate({"run": run, "rank": int(rank), "want": want})
        except ValueError:
            return None


class RunReport(BaseModel):
    """A rank's state. ENDED is final: its checkpoints are pushed, its output is acknowledged, its directories are gone.

    ``exit_code`` is 128 + n for signal n. LOST: this node has no such run, or the machine has restarted since.
    ``scratch_bytes``: of the rank's scratch in use when it was last measured; null before, and after a restart of the agent
    once scratch is gone. ``scratch_limit_bytes`` is its bound.
    """

    run: RunId
    rank: Rank
    state: RankState
    bytes_done: Number = 0
    bytes_total: Number | None = None
    eta_seconds: Annotated[float, Field(allow_inf_nan=False)] | None = None
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    error: ErrorBody | None = None
    sync_status: SyncStatus | None = None
    scratch_bytes: Quantity | None = None
    scratch_limit_bytes: Quantity | None = None


class RegistryLogin(BaseModel):
    registry: str
    username: str
    password: Annotated[str, Field(repr=False)]


class CachePlaces(BaseModel):
    """Where a rank sees its training caches. ``huggingface`` is null if the job did not ask for that folder."""

    project: str
    team: str
    huggingface: str | None = None


class RunSpec(BaseModel):
    """All that a rank needs. The agent stages ``read_grant``, whose mounts include the job's archive and checkpoints.

    ``environment`` is complete, secrets included: the agent stores it for the rank alone. ``working_dir`` is null if
    the commands start in the image's own directory. ``archive``: the place of a staged tar, unpacked into the workspace.
    ``cpus`` and ``memory_bytes`` are limits, which the agent cuts to what the node has; ``checkpoint_bytes`` null is
    the node's own bound. ``loaded``: where the rank
    finds loaded checkpoints; an empty directory if none of the mounts is below it.
    """

    run: str
    rank: int
    gpus: int
    image: str | None
    login: RegistryLogin | None
    cpus: int | None
    memory_bytes: int | None
    commands: list[str]
    environment: Annotated[dict[str, str], Field(repr=False)]
    working_dir: str | None
    archive: str | None
    read_grant: Annotated[str | None, Field(repr=False)]
    scratch: str
    checkpoints: str | None
    checkpoint_bytes: int | None
    push_grant: Annotated[str | None, Field(repr=False)]
    caches: CachePlaces | None
    cache_grant: Annotated[str | None, Field(repr=False)]
    loaded: str | None = None


class RunOutput(
    StrictModel, json_schema_extra={"examples": [{"seq": 0, "lines": [[1_800_000_000_000_000_000, "step 1"]]}]}
):
    """Lines of a rank's output, each with its time in nanoseconds since the epoch. Repeated under the same ``seq``."""

    seq: Annotated[StrictInt, Field(ge=0, lt=2**53)]
    lines: Annotated[
        list[tuple[StrictInt, Annotated[StrictStr, Field(max_length=LONGEST_LINE)]]],
        Field(max_length=LINES_AT_ONCE, fail_fast=True),
    ]
