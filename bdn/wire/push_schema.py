"""Pushes and checkpoints: what ``/pushes``, ``/checkpoints`` and the data port's ``PUT`` take and answer."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, JsonValue, StrictStr
from pydantic_core import PydanticCustomError

from bdn.core.training.checkpoints import ADAPTER_CONFIG_BYTES, CheckpointType
from bdn.wire.access_schema import LONGEST_SECONDS
from bdn.wire.mirror_schema import ManifestName
from bdn.wire.shapes import Quantity, StrictModel

CHUNKS_AT_ONCE: Final = 1000

_Value = TypeVar("_Value")
_SKIPPED_BYTES: Final = 16 * 1024  # of JSON: each listing of checkpoints repeats it
_Text = Annotated[StrictStr, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_MOST_FILES: Final = 10_000_000  # of a push; the request's bytes and BDN_LIMIT_FILES end it sooner
_MOST_CHUNKS: Final = 10_000_000  # of one file: 80 TB
_ZEROS: Final = f"b3:{'0' * 64}"
_FILE: Final[dict[str, JsonValue]] = {"path": "model.safetensors", "size": 2**20, "chunks": [_ZEROS]}
_SOURCE: Final = "bt://project@job/checkpoint-100"


def _check_size(value: _Value, limit: int) -> _Value:
    if (size := len(json.dumps(value))) > limit:
        raise PydanticCustomError(
            "too_large", "is {size} bytes of JSON; the limit is {limit}", {"size": size, "limit": limit}
        )
    return value


_AdapterConfig = Annotated[
    dict[str, Any],
    Field(max_length=1000, json_schema_extra={"x-max-bytes": ADAPTER_CONFIG_BYTES}),
    AfterValidator(partial(_check_size, limit=ADAPTER_CONFIG_BYTES)),
]
_Skipped = Annotated[
    list[_Text],
    Field(max_length=1000, fail_fast=True, json_schema_extra={"x-max-bytes": _SKIPPED_BYTES}),
    AfterValidator(partial(_check_size, limit=_SKIPPED_BYTES)),
]


def skipped_within_bounds(skipped: Sequence[str]) -> list[str]:
    """As many reasons as a commit may have, then the number of the rest."""
    kept: list[str] = []
    left = _SKIPPED_BYTES - 100  # for the brackets, and for the count of the rest
    for one in skipped:
        left -= len(json.dumps(one)) + len(", ")
        if left < 0:
            return [*kept, f"and {len(skipped) - len(kept)} more"]
        kept.append(one)
    return kept


class PushRequest(StrictModel, json_schema_extra={"examples": [{"source": _SOURCE}]}):
    """Names one checkpoint of one job, and the rank that writes it where that is not 0: ``bt://project@job/name#rank-1``."""

    source: Annotated[StrictStr, Field(min_length=1, max_length=4096)]


class Push(BaseModel):
    """``push_id`` is a mirror's, whose bytes come from its caller. Without a call for it until ``expires_at`` it is given up.

    Chunks go to ``data_port`` of the host that answered; null where that one takes none.
    """

    push_id: str
    expires_at: datetime
    data_port: int | None


class CommittedPush(BaseModel):
    """The push that brought the newest version of a checkpoint, and when that was committed."""

    push_id: str
    source: str
    committed_at: datetime


class PushGrantRequest(StrictModel, json_schema_extra={"examples": [{"job": "bt://project@job#rank-1"}]}):
    """A grant to push for one rank of a job, which is good for ``expires_seconds``; 30 days unless said."""

    job: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    expires_seconds: Annotated[int, Field(gt=0, le=LONGEST_SECONDS)] = 30 * 86400


class PushGrantDocument(BaseModel):
    """``grant`` is shown as ``Authorization: Bearer``, to the calls of pushes alone."""

    grant: Annotated[str, Field(repr=False)]
    job: str
    expires_at: datetime


class ChunkList(StrictModel, json_schema_extra={"examples": [{"chunks": [_ZEROS]}]}):
    """Chunks by name."""

    chunks: Annotated[list[ManifestName], Field(max_length=CHUNKS_AT_ONCE, fail_fast=True)]


class PushedFile(StrictModel):
    """A file of 1 MiB or more and its chunks of 8 MiB in their order, of which the last one is the rest.

    A smaller one has its digest, and lies at ``offset`` in ``slab``, a chunk that is some files one after the other, in the order
    of their paths. An empty one has neither.
    """

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    size: Quantity
    chunks: Annotated[list[ManifestName], Field(max_length=_MOST_CHUNKS, fail_fast=True)] = []
    digest: ManifestName | None = None
    slab: ManifestName | None = None
    offset: Quantity | None = None


class CheckpointDetails(StrictModel):
    """What whoever wrote it knows of a checkpoint. ``created_at`` is the time of its newest file; ``skipped`` were no files."""

    checkpoint_type: CheckpointType = "other"
    base_model: _Text | None = None
    lora_adapter_config: _AdapterConfig | None = None
    created_at: AwareDatetime | None = None
    skipped: _Skipped = []


class CommitRequest(StrictModel, json_schema_extra={"examples": [{"files": [_FILE]}]}):
    """All files of the checkpoint. Every chunk was sent in this push, or was not missing."""

    files: Annotated[list[PushedFile], Field(min_length=1, max_length=_MOST_FILES, fail_fast=True)]
    details: CheckpointDetails = CheckpointDetails()


class Project(BaseModel):
    """What jobs belong to that continue each other's work. ``size_bytes`` are those of its checkpoints, each counted for itself."""

    id: str
    name: str
    team: str
    created_at: datetime
    checkpoints: int
    size_bytes: int


class Checkpoint(BaseModel):
    """A checkpoint as one rank pushed it; ``sync_status`` is SYNCING while any rank pushes one of this name. ``source`` is what mirrors, stages and pulls name it by; ``size_bytes`` is this rank's. Only one that ``is_loadable`` is the newest of a project or a job."""

    id: str
    checkpoint_id: str
    source: str
    project_id: str
    project_name: str
    team: str
    job: str
    rank: int
    created_at: datetime
    committed_at: datetime
    sync_status: Literal["SYNCING", "COMPLETE"]
    checkpoint_type: CheckpointType
    base_model: str | None
    lora_adapter_config: dict[str, Any] | None
    skipped: list[str]
    manifest: str
    files: int
    size_bytes: int
    is_loadable: bool
