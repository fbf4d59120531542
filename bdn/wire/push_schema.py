"""Pushes and checkpoints: requests and answers of ``/pushes``, ``/checkpoints`` and the data port's ``PUT``."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, JsonValue, StrictStr

from bdn.core.training.checkpoints import ADAPTER_CONFIG_BYTES, CheckpointType
from bdn.wire.access_schema import LONGEST_SECONDS
from bdn.wire.mirror_schema import ManifestName
from bdn.wire.shapes import Quantity, StrictModel, check_json_size

CHUNKS_AT_ONCE: Final = 1000

_SKIPPED_BYTES: Final = 16 * 1024  # of JSON: each listing of checkpoints repeats it
_Text = Annotated[StrictStr, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_MOST_FILES: Final = 10_000_000  # of a push; the request's size and BDN_LIMIT_FILES bound it earlier
_MOST_CHUNKS: Final = 10_000_000  # of one file: 80 TB
_ZEROS: Final = f"b3:{'0' * 64}"
_FILE: Final[dict[str, JsonValue]] = {"path": "model.safetensors", "size": 2**20, "chunks": [_ZEROS]}
_SOURCE: Final = "bt://project@job/checkpoint-100"


_AdapterConfig = Annotated[
    dict[str, Any],
    Field(max_length=1000, json_schema_extra={"x-max-bytes": ADAPTER_CONFIG_BYTES}),
    AfterValidator(partial(check_json_size, limit=ADAPTER_CONFIG_BYTES)),
]
_Skipped = Annotated[
    list[_Text],
    Field(max_length=1000, fail_fast=True, json_schema_extra={"x-max-bytes": _SKIPPED_BYTES}),
    AfterValidator(partial(check_json_size, limit=_SKIPPED_BYTES)),
]


def skipped_within_bounds(skipped: Sequence[str]) -> list[str]:
    """As many reasons as a commit may contain, then the number of the others."""
    kept: list[str] = []
    left = _SKIPPED_BYTES - 100  # for the brackets, and for the count of the others
    for one in skipped:
        left -= len(json.dumps(one)) + len(", ")
        if left < 0:
            return [*kept, f"and {len(skipped) - len(kept)} more"]
        kept.append(one)
    return kept


class PushRequest(StrictModel, json_schema_extra={"examples": [{"source": _SOURCE}]}):
    """One checkpoint of one job, with the rank that writes it unless that is 0: ``bt://project@job/name#rank-1``."""

    source: Annotated[StrictStr, Field(min_length=1, max_length=4096)]


class Push(BaseModel):
    """``push_id`` names a mirror whose bytes the caller sends. It expires at ``expires_at`` unless a call renews it.

    Chunks go to ``data_port`` of the host that answered; null if that host accepts none.
    """

    push_id: str
    expires_at: datetime
    data_port: int | None


class CommittedPush(BaseModel):
    """The push of the newest version of a checkpoint, and the time of its commit."""

    push_id: str
    source: str
    committed_at: datetime


class PushGrantRequest(StrictModel, json_schema_extra={"examples": [{"job": "bt://project@job#rank-1"}]}):
    """A grant to push for one rank of a job, valid for ``expires_seconds``, by default 30 days."""

    job: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    expires_seconds: Annotated[int, Field(gt=0, le=LONGEST_SECONDS)] = 30 * 86400


class PushGrantDocument(BaseModel):
    """``grant`` is valid as ``Authorization: Bearer`` for calls of pushes only."""

    grant: Annotated[str, Field(repr=False)]
    job: str
    expires_at: datetime


class ChunkList(StrictModel, json_schema_extra={"examples": [{"chunks": [_ZEROS]}]}):
    chunks: Annotated[list[ManifestName], Field(max_length=CHUNKS_AT_ONCE, fail_fast=True)]


class PushedFile(StrictModel):
    """A file of 1 MiB or more, with its chunks of 8 MiB in order; the last one is the remainder.

    A smaller file has its digest, and is at ``offset`` in ``slab``, a chunk of concatenated files in the order of their
    paths. An empty file has neither.
    """

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096)]
    size: Quantity
    chunks: Annotated[list[ManifestName], Field(max_length=_MOST_CHUNKS, fail_fast=True)] = []
    digest: ManifestName | None = None
    slab: ManifestName | None = None
    offset: Quantity | None = None


class CheckpointDetails(StrictModel):
    """A checkpoint as described by its writer. ``created_at`` is its newest file's; ``skipped`` lists non-files."""

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
    """Jobs that continue each other's work. ``size_bytes`` is the sum over checkpoints, without deduplication."""

    id: str
    name: str
    team: str
    created_at: datetime
    checkpoints: int
    size_bytes: int


class Checkpoint(BaseModel):
    """A checkpoint as pushed by one rank. Mirrors, stages and pulls use its ``source``; ``size_bytes`` is this rank's.

    ``sync_status`` is SYNCING while any rank pushes a checkpoint of this name. Only a checkpoint that ``is_loadable``
    can be the newest of a project or a job.
    """

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
