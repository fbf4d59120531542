"""Training caches: documents of the mirror (``/caches``) and the agent (``/shared-caches``), and packed summaries."""

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, Field, StrictBool, StrictStr, TypeAdapter

from bdn.core.errors import BdnError, InvalidRequestError
from bdn.core.json_bounds import ElementCount
from bdn.core.source.uri import PROJECT_PATTERN
from bdn.core.training.cache_summary import ENTRIES_LIMIT, FileType, SummaryEntry
from bdn.wire.shapes import LARGEST, ErrorBody, Items, Label, Quantity, StrictModel, moment

_UNPACKED_LIMIT: Final = 128 * 1024**2  # bytes of JSON; 100,000 files need 25 MB, and six times as many with odd names
_PIECE: Final = 256 * 1024
_UNPACKED_SLACK: Final = 8 * 1024**2
_BYTES_PER_ELEMENT: Final = 512  # average for an entry's path, size, time, …
ProjectName = Annotated[StrictStr, Field(pattern=f"^{PROJECT_PATTERN}$")]
ProjectId = Annotated[StrictStr, Field(pattern=r"^[a-z0-9]{10}$")]
ClusterName = Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
VolumeId = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class CacheRequest(
    StrictModel, json_schema_extra={"examples": [{"project": "llama", "cluster": "gpus", "volume_id": "0" * 32}]}
):
    """A job of the project (by name or id) is about to run in ``cluster``, on a node whose agent has this volume.

    ``offered_in``: the clusters that have the GPU type, busy or not; null means that this cluster has it, as far as the
    caller knows. Without a GPU type every cluster suits the job.
    """

    project: ProjectName
    cluster: ClusterName
    volume_id: VolumeId
    require_cache_affinity: StrictBool = True
    gpu_type: Annotated[StrictStr | None, Field(max_length=128)] = None
    offered_in: Annotated[list[ClusterName], Field(max_length=10_000, fail_fast=True)] | None = None


class CacheGrantDocument(BaseModel):
    """``grant`` is for the agent of a node in ``cluster``, which opens the directories for a job."""

    grant: Annotated[str, Field(repr=False)]
    project_id: str
    team_id: str
    cluster: str
    expires_at: datetime


class CacheLimit(StrictModel, json_schema_extra={"examples": [{"limit_bytes": 2_000_000_000_000}]}):
    """How many bytes the cache may hold; null: the value of ``BDN_CACHE_BYTES``."""

    limit_bytes: Quantity | None


class FileSummary(BaseModel):
    """One entry of a cache. ``size_bytes`` of a directory is 0, or the size of its files if these are not listed."""

    path: Annotated[str, Field(max_length=4 * 4096)]  # a byte that is not UTF-8 is written as four characters
    size_bytes: Quantity
    modified: datetime
    file_type: FileType
    permissions: Label

    @classmethod
    def of(cls, entry: SummaryEntry) -> "FileSummary":
        """Bytes of a path that are not UTF-8 are escaped."""
        path = entry.path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        kind = entry.file_type or "file"
        return cls(
            path=path,
            size_bytes=min(entry.size, LARGEST),  # sparse files
            modified=moment(entry.modified),
            file_type=kind,
            permissions=entry.permissions,
        )


_SUMMARIES: Final = TypeAdapter(
    Annotated[list[FileSummary], Field(max_length=ENTRIES_LIMIT, fail_fast=True)],
)
_ELEMENTS_LIMIT: Final = ENTRIES_LIMIT * (len(FileSummary.model_fields) + 1) + 1


def pack(entries: Iterable[FileSummary]) -> str:
    """The entries as text: JSON, gzip, base64."""
    return base64.b64encode(gzip.compress(_SUMMARIES.dump_json(list(entries)), 6, mtime=0)).decode()


def unpack(packed: str) -> list[FileSummary]:
    """Raises ``InvalidRequestError``: not what ``pack`` writes, or too many entries."""
    try:
        content = _unpacked(base64.b64decode(packed, validate=True))
        return _SUMMARIES.validate_json(content)
    except (ValueError, binascii.Error, zlib.error, BdnError):
        raise InvalidRequestError("the summary's entries are not what an agent packs") from None


def _unpacked(compressed: bytes) -> bytes:
    """The unpacked JSON, counted before any of it is stored: a few kilobytes may unpack to gigabytes.

    Raises ``ValueError``, ``zlib.error``, ``LimitExceededError``: too much, or cut off.
    """
    elements = ElementCount("the summary", _ELEMENTS_LIMIT)
    for piece, size in _pieces(compressed):
        elements.add(piece)
        if size > _UNPACKED_SLACK + elements.count * _BYTES_PER_ELEMENT:
            raise ValueError("more text than entries have")
    elements.check_depth()
    return b"".join(piece for piece, _ in _pieces(compressed))


def _pieces(compressed: bytes) -> Iterator[tuple[bytes, int]]:
    """The unpacked pieces, each with the total size so far."""
    stream, size = zlib.decompressobj(wbits=31), 0
    while not stream.eof:
        piece = stream.decompress(compressed, _PIECE)
        size += len(piece)
        if size > _UNPACKED_LIMIT or not (piece or stream.eof):
            raise ValueError("too large, or cut off")
        yield piece, size
        compressed = stream.unconsumed_tail


class CacheSummaryBody(
    StrictModel,
    json_schema_extra={
        "examples": [
            {"volume_id": "0" * 32, "timestamp": "2026-11-25T10:00:00Z", "size_bytes": 0, "files": 0, "packed": ""}
        ]
    },
):
    """An agent's scan of a cache: sums over everything, and entries as written by ``pack``."""

    volume_id: VolumeId
    timestamp: AwareDatetime
    size_bytes: Quantity
    files: Quantity
    packed: Annotated[StrictStr, Field(max_length=_UNPACKED_LIMIT)]


class CacheSummaryDocument(BaseModel):
    """The newest summary. Paths are relative to the directory where a job finds its caches."""

    timestamp: datetime
    project_id: str
    file_summaries: list[FileSummary]


class TrainingCacheDirectory(BaseModel):
    """A project's cache in one cluster, as of its last summary; null: no summary yet."""

    cluster: str
    volume_id: str
    size_bytes: int | None
    files: int | None
    captured_at: datetime | None


class ProjectCache(BaseModel):
    """A project's caches. ``cluster`` is the cluster to which the project is pinned."""

    project_id: str
    project_name: str
    team_id: str
    cluster: str
    limit_bytes: int
    directories: list[TrainingCacheDirectory]


class CacheRemoval(BaseModel):
    """The cache of a deleted project, which no agent of its cluster has removed yet, or could remove."""

    id: str
    project_id: str
    cluster: str
    asked_at: datetime
    state: Literal["PENDING", "RUNNING", "FAILED"]
    error: ErrorBody | None = None


class Caches(Items[ProjectCache]):
    """All caches of an organisation, and the remaining caches of deleted projects."""

    removals: list[CacheRemoval] = []


class RemoveCacheCommand(BaseModel):
    """The mirror's command to an agent that has this volume: remove everything of a project."""

    id: str
    organisation: str
    project: ProjectId
    volume_id: str


class RemoveCacheReport(BaseModel):
    """``removed``: the agent found something to remove."""

    removed: bool = False


class SharedCache(BaseModel):
    """A project's cache that jobs of this node have mounted."""

    project_id: str
    holders: list[str]
    captured_at: datetime | None


class SharedCachesDocument(Items[SharedCache]):
    """The caches that this node has mounted from its cluster's shared volume."""

    cluster: str
    root: str
    volume_id: str


class SummaryRequest(StrictModel, json_schema_extra={"examples": [{"project": "0123456789"}]}):
    """A project by its id."""

    project: ProjectId


class RemovalRequest(
    StrictModel, json_schema_extra={"examples": [{"project": "0123456789", "path": "user_artifacts/old"}]}
):
    """A path below a project's caches, as in its summary. ``force``: also while jobs have it mounted."""

    project: ProjectId
    path: Annotated[StrictStr, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    force: StrictBool = False


class Removal(BaseModel):
    project_id: str
    path: str
