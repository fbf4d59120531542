"""Job volumes, the directories that a job may write on a node: requests and answers of the agent's control API."""

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from bdn.wire.shapes import ErrorBody, GivenGrant, StrictModel

Bound = Literal["image", "watch"]
VolumeState = Literal["OPEN", "DRAINING", "ENDED"]
SyncStatus = Literal["SYNCING", "COMPLETED"]

LEAST_BYTES: Final = 16 * 1024**2  # of a bounded directory: a smaller file system holds little but its own metadata
LARGEST_ID: Final = 2**32 - 2  # of a user or a group: for chown(2) the next number means "unchanged"
_Bytes = Annotated[int, Field(ge=LEAST_BYTES, le=10**18)]


class JobVolumeRequest(
    StrictModel, json_schema_extra={"examples": [{"run_id": "train-42", "scratch_bytes": 10_000_000_000}]}
):
    """The directories that one rank of a run may write on this node. Idempotent.

    Without ``scratch_bytes`` the agent's settings apply. Checkpoints are pushed to the job of ``push_grant``; it and
    ``checkpoint_bytes`` are given together or not at all. ``cache_grant`` is for training caches, with ``huggingface``
    also for the project's folder of that name. The directories belong to the user ``uid`` and the group ``gid``;
    without ``uid`` to the user that calls over the unix socket, or else to the agent's own user.
    """

    run_id: Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
    rank: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    uid: Annotated[int, Field(ge=0, le=LARGEST_ID)] | None = None
    gid: Annotated[int, Field(ge=0, le=LARGEST_ID)] | None = None
    scratch_bytes: _Bytes | None = None
    checkpoint_bytes: _Bytes | None = None
    cache_grant: GivenGrant | None = Field(default=None, repr=False)
    huggingface: StrictBool = False
    push_grant: GivenGrant | None = Field(default=None, repr=False)


class BoundedDirectory(BaseModel):
    """A directory that holds at most ``bytes``.

    With ``image`` it is a file system of that size, and writing more fails with ENOSPC. With ``watch`` the agent
    measures it every few seconds; beyond the bound the volume has the error SCRATCH_FULL, and the controller that
    started the run must stop it. ``used_bytes`` is null if it is unknown.
    """

    path: str
    bytes: int
    bound: Bound
    used_bytes: int | None


class CheckpointDirectory(BoundedDirectory):
    """Pushed as ``job``. ``sync_status`` is SYNCING while some of it is not pushed. ``error`` is the last try's.

    ``left`` are checkpoints that were incomplete when the run ended: they are never pushed.
    """

    job: str
    sync_status: SyncStatus
    unsynced_bytes: int
    pushed: list[str] = []
    left: list[str] = []
    error: ErrorBody | None = None


class CacheFolders(BaseModel):
    """A run's mounted training caches, of a project by its id. ``huggingface`` is null if it was not requested."""

    project_id: str
    project: str
    team: str
    huggingface: str | None


class JobVolume(BaseModel):
    """A rank's directories. DRAINING: the run ended, scratch is gone, remaining checkpoints are pushed; then ENDED."""

    id: str
    run_id: str
    rank: int
    uid: int | None = None
    gid: int | None = None
    state: VolumeState
    created_at: datetime
    ended_at: datetime | None
    scratch: BoundedDirectory | None
    checkpoints: CheckpointDirectory | None
    caches: CacheFolders | None = None
    error: ErrorBody | None = None
