"""Stages and the cache: what the agent's control API takes and answers."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from bdn.core.chunk import digest_of
from bdn.wire.mirror_schema import Holding
from bdn.wire.shapes import ErrorBody, GivenGrant, Number, StrictModel, Text

StageState = Literal["PENDING", "STAGING", "READY", "FAILED", "RELEASED"]
TERMINAL: frozenset[StageState] = frozenset({"READY", "FAILED", "RELEASED"})
ViewKind = Literal["hardlink", "reflink", "given", "copy"]
ExposureKind = Literal["bind", "symlink", "none"]
WarmState = Literal["WARMING", "WARM", "SKIPPED", "STOPPED"]


def stage_id_of(job_id: str, reader: str, manifests: Mapping[str, str]) -> str:
    """The id of the stage of these manifests, by mount location: equal content, equal id, so that asking twice is asking once.

    A renewed grant differs in its expiry alone and therefore names the same stage. ``reader`` is the organisation or the team whose
    grant it is: a job of another one that has the same id has a stage of its own, which it releases by itself.
    """
    lines = sorted(f"{mount_location}\0{manifest}" for mount_location, manifest in manifests.items())
    text = "".join(f"{len(part)}:{part}" for part in (job_id, reader, *lines))  # no two lists make one text
    return f"stg_{digest_of(text.encode('utf-8', 'surrogatepass')).hex[:24]}"


class StageRequest(
    StrictModel,
    json_schema_extra={"examples": [{"job_id": "job-1", "grant": "the grant of a READY mirror", "wait": True}]},
):
    """Make a grant's files appear on this node for a job. With ``warm`` they are then read into memory, too."""

    job_id: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    grant: GivenGrant
    ttl_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None
    wait: StrictBool = False
    warm: StrictBool = False


_Directory = Annotated[StrictStr, Field(pattern=r"^/[^\x00]*$", max_length=4096)]


class PullCheck(StrictModel, json_schema_extra={"examples": [{"destination": "/home/me/model"}]}):
    """Whether a pull could put files at a directory, and with ``grant`` what would go there."""

    destination: _Directory
    grant: GivenGrant | None = None


class PullRequest(
    StrictModel,
    json_schema_extra={"examples": [{"destination": "/home/me/model", "grant": "the grant of a READY mirror"}]},
):
    """Put the files of a grant's only manifest at a directory, with ``link`` as hard links into the cache."""

    destination: _Directory
    grant: GivenGrant
    link: StrictBool = False


class PullLosses(BaseModel):
    """The manifest that an earlier pull put at the directory, empty if none did, and its paths that this one would remove or replace."""

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
        """All tiers together."""
        return self.node + self.cluster + self.mirror


class MountFacts(BaseModel):
    """One manifest of a stage: what the agent records of it and says of it."""

    mount_location: str
    manifest: str
    source: str
    view: ViewKind | None = None
    view_reason: str | None = None
    exposure: ExposureKind | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_from: BytesFrom = BytesFrom()


class StageMount(MountFacts):
    """One manifest of a stage. ``path`` is where its files are on this host, once the stage is READY.

    ``bytes_under_way`` have come from the cluster or the mirror, and are not among ``bytes_done`` yet.
    """

    path: str
    bytes_done: int = 0
    bytes_under_way: int = 0


# What a chunk of a stage waits for, in the order in which it comes to them; docs/architecture.md says what each is for.
ChunkStep = Literal["bandwidth", "order", "thread", "owner", "cluster", "same_chunk", "mirror", "disk"]


class Transfer(BaseModel):
    """What a stage has spent on sources that failed or were slow, and where its chunks are now.

    ``bytes_hedged`` were asked for again elsewhere, because their first source was late; ``peers_avoided`` are left alone
    for a while, by all stages of the agent. ``chunks_at`` counts the chunks that were begun by what they wait for.
    """

    retries: int = 0
    retries_left: int
    bytes_hedged: int = 0
    peers_avoided: list[str] = []
    chunks_at: dict[ChunkStep, int] = {}


class Warm(BaseModel):
    """How far a stage's files were read into memory. ``reason`` says why not all of them were: SKIPPED, or STOPPED on the way."""

    state: WarmState
    bytes: int
    bytes_total: int
    seconds: float
    reason: str | None = None


class StageDocument(BaseModel):
    """The files of a job on this node, and how far they are.

    ``transfer`` is null until it is known what is missing; ``warm`` until the stage is READY, and where nobody wants it.
    """

    id: str
    job_id: str
    state: StageState
    created_at: datetime
    ready_at: datetime | None = None
    expires_at: datetime | None = None
    mounts: list[StageMount]
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    transfer: Transfer | None = None
    warm: Warm | None = None
    error: ErrorBody | None = None


class TierUse(BaseModel):
    """The space of one tier, in bytes. ``leased`` is part of committed and reserved.

    ``pressed`` is part of the budget: others fill the disk, which has that much less for this tier than it keeps. ``problem``
    says why nothing new comes in, such as a disk that fails; where that does not say how much room it has, the budget is
    what is held.
    """

    budget: Number
    committed: Number
    reserved: Number
    leased: Number
    pressed: Number = 0
    problem: Text | None = None


class Writes(BaseModel):
    """How content gets onto the disk: past the page cache, or through it for a reason."""

    direct: bool
    reason: str | None = None


class Cache(BaseModel):
    """What this node's cache holds, least recently used first."""

    tiers: dict[str, TierUse]
    manifests: list[Holding]
    writes: Writes | None = None  # of an agent that is older than this field
