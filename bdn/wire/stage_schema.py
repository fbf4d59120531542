"""Stages and the cache: requests and answers of the agent's control API."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from bdn.core.chunk import digest_of
from bdn.wire.mirror_schema import Holding, ManifestName
from bdn.wire.shapes import ErrorBody, GivenGrant, Label, Locator, Number, Quantity, StrictModel, Text

StageState = Literal["PENDING", "STAGING", "READY", "FAILED", "RELEASED"]
TERMINAL: frozenset[StageState] = frozenset({"READY", "FAILED", "RELEASED"})
ViewKind = Literal["hardlink", "reflink", "copy"]
StageView = Literal["files", "hub"]
ExposureKind = Literal["bind", "symlink", "none"]
WarmState = Literal["WARMING", "WARM", "SKIPPED", "STOPPED"]


def stage_id_of(job_id: str, reader: str, manifests: Mapping[str, str]) -> str:
    """The id of the stage of these manifests, by mount location. Equal content, equal id: requests are idempotent.

    A renewed grant differs only in its expiry, so it names the same stage. ``reader`` is the organisation or team of
    the grant: a job of another reader with the same id has its own stage, and releases it independently.
    """
    lines = sorted(f"{mount_location}\0{manifest}" for mount_location, manifest in manifests.items())
    text = "".join(f"{len(part)}:{part}" for part in (job_id, reader, *lines))  # unambiguous: length-prefixed
    return f"stg_{digest_of(text.encode('utf-8', 'surrogatepass')).hex[:24]}"


class StageRequest(
    StrictModel,
    json_schema_extra={"examples": [{"job_id": "job-1", "grant": "the grant of a READY mirror", "wait": True}]},
):
    """Make a grant's files appear on this node for a job. With ``warm`` they are then read into memory, too.

    With ``view`` ``hub`` each mount shows the folder of its repository as in the cache of the hub's client, to be
    mounted at ``$HF_HUB_CACHE/models--org--name``. Mounts of one repository share a folder.
    """

    job_id: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    grant: GivenGrant
    view: StageView = "files"
    ttl_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None
    wait: StrictBool = False
    warm: StrictBool = False


_Directory = Annotated[StrictStr, Field(pattern=r"^/[^\x00]*$", max_length=4096)]


class PullCheck(StrictModel, json_schema_extra={"examples": [{"destination": "/home/me/model"}]}):
    """Whether a pull could write to a directory, and with ``grant`` which earlier files it would remove or replace."""

    destination: _Directory
    grant: GivenGrant | None = None
    hub: StrictBool = False


class PullRequest(
    StrictModel,
    json_schema_extra={"examples": [{"destination": "/home/me/model", "grant": "the grant of a READY mirror"}]},
):
    """Put the files of a grant's only manifest at a directory, with ``link`` as hard links into the cache.

    With ``hub`` the directory is ``<repository>/snapshots/<commit>`` in a cache of the hub's client, whose listing
    ``trees/<commit>.json`` exists; the files are added to it.
    """

    destination: _Directory
    grant: GivenGrant
    link: StrictBool = False
    hub: StrictBool = False


class PullLosses(BaseModel):
    """``earlier``: the last pull's manifest there, or empty. ``lost``: its paths that this pull removes or replaces."""

    earlier: str = ""
    lost: list[str] = []


class RenewRequest(StrictModel, json_schema_extra={"examples": [{"ttl_seconds": 3600}]}):
    """A new time to live, counted from now; null means until the stage is released."""

    ttl_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None


class BytesFrom(BaseModel):
    """Where a mount's bytes came from: this node's cache, the cluster's ring, the mirror."""

    node: Number = 0
    cluster: Number = 0
    mirror: Number = 0

    @property
    def total(self) -> int:
        return self.node + self.cluster + self.mirror


class MountFacts(BaseModel):
    """One manifest of a stage, as the agent records and reports it. ``commit`` is set for repositories of a hub."""

    mount_location: str
    manifest: str
    source: str
    commit: str | None = None
    view: ViewKind | None = None
    view_reason: str | None = None
    exposure: ExposureKind | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_from: BytesFrom = BytesFrom()


class StageMount(MountFacts):
    """One manifest of a stage. ``path`` is where its files are on this host, once the stage is READY.

    With the view ``hub``, ``path`` is the folder of the repository, and the files are in ``snapshots/<commit>`` there.

    ``bytes_under_way`` were received from the cluster or the mirror, and are not included in ``bytes_done`` yet.
    """

    path: str
    bytes_done: int = 0
    bytes_under_way: int = 0


# What a chunk of a stage waits for, in order; docs/architecture.md describes each step.
ChunkStep = Literal["bandwidth", "order", "thread", "owner", "cluster", "same_chunk", "mirror", "disk"]


class Transfer(BaseModel):
    """A stage's effort on failed or slow sources, and the current state of its chunks.

    ``bytes_hedged`` were requested again elsewhere, because their first source was slow; all stages of the agent avoid
    ``peers_avoided`` for a while. ``chunks_at`` counts started chunks by what they wait for.
    """

    retries: int = 0
    retries_left: int
    bytes_hedged: int = 0
    peers_avoided: list[str] = []
    chunks_at: dict[ChunkStep, int] = {}


class Warm(BaseModel):
    """How much of a stage's files was read into memory. ``reason`` is set for SKIPPED and STOPPED."""

    state: WarmState
    bytes: int
    bytes_total: int
    seconds: float
    reason: str | None = None


class StageDocument(BaseModel):
    """The files of a job on this node, and their progress.

    ``transfer`` is null until the missing chunks are known; ``warm`` until the stage is READY, and if it was not
    requested.
    """

    id: str
    job_id: str
    state: StageState
    view: StageView = "files"
    created_at: datetime
    ready_at: datetime | None = None
    expires_at: datetime | None = None
    mounts: list[StageMount]
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    transfer: Transfer | None = None
    warm: Warm | None = None
    error: ErrorBody | None = None


STAGES_REPORTED: Final = 50  # in one heartbeat
MANIFESTS_REPORTED: Final = 16  # of one stage


class StageReport(BaseModel):
    """A stage in its agent's heartbeat: unfinished, or READY or FAILED for less than a minute.

    ``mirror_id`` is null if the grant names no mirror. ``manifests``: the first 16. ``bytes_done`` are on the node, of
    ``bytes_total``, which is null until the manifests are known. ``bytes_per_second``: of the last five seconds, and of the
    whole time once the stage is READY. ``since``: when the state began, in seconds since the epoch by the node's clock.
    ``error`` is the code of the error with which the stage FAILED.
    """

    id: Label
    job: Locator
    mirror_id: Annotated[str, Field(pattern=r"^mir_[0-9a-f]{24}$")] | None
    manifests: Annotated[list[ManifestName], Field(max_length=MANIFESTS_REPORTED, fail_fast=True)]
    state: StageState
    bytes_done: Quantity
    bytes_total: Quantity | None
    bytes_per_second: Quantity | None
    since: Annotated[float, Field(ge=0, lt=2**63)]
    error: Annotated[str, Field(max_length=64, pattern=r"^[A-Z_]+$")] | None


class JobStage(BaseModel):
    """A stage of a job on one node, as the node's last heartbeat described it, at ``reported_at``.

    ``alive``: the node sent a heartbeat within a minute; the figures of another node are old. ``organisation`` is null if
    the stage's mirror is unknown; only operators see such stages. ``eta_seconds`` is null if rate or total is
    unknown, and once the stage has ended.
    """

    cluster: str
    node: str
    alive: bool
    reported_at: datetime
    id: str
    job: str
    organisation: str | None
    mirror_id: str | None
    manifests: list[str]
    state: StageState
    bytes_done: int
    bytes_total: int | None
    bytes_per_second: int | None
    eta_seconds: float | None
    since: datetime
    error: str | None


class TierUse(BaseModel):
    """The space of one tier, in bytes. ``leased`` is part of committed and reserved.

    ``pressed`` is the part of the budget for which the disk has no room, because other data fills it. ``problem`` is
    the reason why nothing new is admitted, such as a failing disk; if the disk cannot report its free space, the budget
    is what is held.
    """

    budget: Number
    committed: Number
    reserved: Number
    leased: Number
    pressed: Number = 0
    problem: Text | None = None


class Writes(BaseModel):
    """How content is written to the disk: past the page cache, or for a reason through it."""

    direct: bool
    reason: str | None = None


class Cache(BaseModel):
    """This node's cache, least recently used first."""

    tiers: dict[str, TierUse]
    manifests: list[Holding]
    writes: Writes | None = None  # null from agents older than this field
