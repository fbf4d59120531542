"""Job volumes: what a job may write on a node. What the agent's control API takes and answers."""

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from bdn.wire.shapes import ErrorBody, GivenGrant, StrictModel

Bound = Literal["image", "watch"]
VolumeState = Literal["OPEN", "DRAINING", "ENDED"]
SyncStatus = Literal["SYNCING", "COMPLETED"]

LEAST_BYTES: Final = 16 * 1024**2  # of a directory with a bound: a smaller file system holds little but itself
LARGEST_ID: Final = 2**32 - 2  # of a user or a group: chown(2) takes the number above it for "leave it"
_Bytes = Annotated[int, Field(ge=LEAST_BYTES, le=10**18)]


class JobVolumeRequest(
    StrictModel, json_schema_extra={"examples": [{"run_id": "train-42", "scratch_bytes": 10_000_000_000}]}
):
    """What one rank of a run may write on this node. Asking again is asking once.

    Without ``scratch_bytes`` they are those of the agent's settings. Checkpoints are pushed as what ``push_grant`` is for, and both are given
    or neither. ``cache_grant`` is for training caches, with ``huggingface`` also for the project's folder of that name. The directories belong
    to the user ``uid`` and to the group ``gid``; without ``uid`` to the user who calls over the unix socket, or else to the agent's own user.
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
    """A directory that holds no more than ``bytes``.

    With ``image`` it is a file system of that size, and who writes more gets ENOSPC. With ``watch`` it is looked at every few seconds; beyond
    the bound the volume has the error SCRATCH_FULL, and whoever started the run is to stop it. ``used_bytes`` is null where it cannot be told.
    """

    path: str
    bytes: int
    bound: Bound
    used_bytes: int | None


class CheckpointDirectory(BoundedDirectory):
    """``job`` is what it is pushed as. ``sync_status`` is SYNCING while something of it was not pushed. ``error`` is that of the last try.

    ``left`` are checkpoints that were not complete when the run had ended: they are never pushed.
    """

    job: str
    sync_status: SyncStatus
    unsynced_bytes: int
    pushed: list[str] = []
    left: list[str] = []
    error: ErrorBody | None = None


class CacheFolders(BaseModel):
    """The training caches that a run has mounted, of a project by its id. ``huggingface`` is null where it was not asked for."""

    project_id: str
    project: str
    team: str
    huggingface: str | None


class JobVolume(BaseModel):
    """What a rank may write. DRAINING: the run has ended, scratch is gone, and checkpoints are pushed to the end; then it is ENDED."""

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
