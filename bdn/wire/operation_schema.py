"""Operations that the mirror records: evictions, prefetches, verifications, collections. ``heartbeat_schema`` carries them to agents."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.core.store import Kind
from bdn.wire.http_fields import LONGEST_SOURCE
from bdn.wire.mirror_schema import Locators
from bdn.wire.shapes import (
    LARGEST,
    MOST_LISTED,
    ErrorBody,
    Label,
    Number,
    OperationModel,
    Quantity,
    SelectingModel,
    StrictModel,
    Text,
    body_of,
)
from bdn.wire.stage_schema import BytesFrom

_Source = Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)]
_Name = Annotated[StrictStr, Field(max_length=256)]
Tier = Literal["node", "cluster", "mirror"]


class EvictionRequest(SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model", "dry_run": True}]}):
    """Exactly one of ``source``, ``manifest``, ``job``, ``lru_bytes`` and ``all`` says what; the rest narrows where.

    ``lru_bytes`` frees that much on each tier that is selected, and spares the mirror unless ``tier`` names it. ``purge``: what
    the mirror evicts cannot be restored and is collected at once, also what was evicted before. The mirror evicts pushed manifests
    only by ``manifest`` or by a ``bt://`` source.
    """

    selectors = ("source", "manifest", "job", "lru_bytes", "all")

    source: _Source | None = None
    manifest: _Name | None = None
    job: _Source | None = None
    lru_bytes: Annotated[int, Field(gt=0, le=LARGEST)] | None = None
    all: StrictBool = False
    tier: Tier | None = None
    cluster: _Name | None = None
    node: _Name | None = None
    dry_run: StrictBool = False
    force: StrictBool = False
    purge: StrictBool = False

    def check(self) -> None:
        """Refuse to select by nothing or by several things, and to purge a cache: what it evicts is free at once."""
        super().check()
        if self.purge and self.tier in ("node", "cluster"):
            raise InvalidRequestError("purge is for the mirror's store: leave out the tier, or name the tier mirror")


class EvictedItem(BaseModel):
    """One manifest on one tier: evicted (planned, in a dry run), or refused because of its holders.

    What the mirror evicts can be restored until ``restorable_until``; ``bytes`` are free once it is collected after that.
    """

    tier: Tier
    cluster: Label | None = None
    node: Label | None = None
    manifest: Label
    sources: Locators = []
    bytes: Number
    refused: bool = False
    holders: Locators = []
    restorable_until: datetime | None = None


class Eviction(OperationModel):
    """A recorded eviction. ``bytes_freed`` is what a dry run would free.

    ``bytes_kept`` of them stay on the mirror's disk until the first collection after ``kept_until``, and can be restored so long.
    ``skipped_pushed`` counts the pushed manifests of ``skipped_pushed_bytes`` that the mirror did not evict, because they have no
    upstream and the selector does not name them.
    """

    status: Literal["RUNNING", "DONE", "REFUSED", "FAILED"]
    request: EvictionRequest
    items: list[EvictedItem] = []
    unreachable: list[str] = []
    bytes_freed: int = 0
    bytes_kept: int = 0
    kept_until: datetime | None = None
    skipped_pushed: int = 0
    skipped_pushed_bytes: int = 0
    error: ErrorBody | None = None

    def without_holders(self) -> Eviction:
        """For whoever is no operator: jobs that hold the same content may be other organisations'."""
        items = [item.model_copy(update={"holders": []}) for item in self.items]
        return self.model_copy(update={"items": items})


class EvictCommand(BaseModel):
    """What the mirror asks an agent to evict. Sources are resolved to manifests by the mirror.

    ``tier`` is ``node`` or ``cluster``; null means both, and ``lru_bytes`` is then freed on each. ``asked_by`` says in words
    who wants it, of which organisation; the agent writes it down.
    """

    id: str
    source: str | None = None
    tier: Tier | None = None
    manifests: list[str] | None = None
    job: str | None = None
    lru_bytes: int | None = None
    all: bool = False
    dry_run: bool = False
    force: bool = False
    purge: bool = False
    asked_by: str = "somebody"
    organisation: str | None = None


class EvictReport(BaseModel):
    """What went on an agent, and what was refused."""

    items: Annotated[list[EvictedItem], Field(max_length=MOST_LISTED, fail_fast=True)] = []


class PrefetchRequest(
    SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model@main", "cluster": "gpus"}]}
):
    """Exactly one of ``mirror_id``, ``manifest`` and ``source`` says what; ``cluster`` and ``nodes`` say where.

    A source means what it was last mirrored as. Nodes without a cluster are meant by their names in every cluster; a
    cluster without nodes means all of its nodes that live.
    """

    selectors = ("mirror_id", "manifest", "source")

    mirror_id: _Name | None = None
    manifest: _Name | None = None
    source: _Source | None = None
    cluster: _Name | None = None
    nodes: Annotated[list[_Name], Field(max_length=10_000, fail_fast=True)] = []

    def check(self) -> None:
        """Refuse to select by nothing or by several things, and for no node."""
        super().check()
        if self.cluster is None and not self.nodes:
            raise InvalidRequestError("say where to: a cluster, or nodes")


class PrefetchNode(BaseModel):
    """One node's part, as its agent last reported it. UNREACHABLE: the agent has not been heard of for two minutes."""

    cluster: str
    node: str
    state: Literal["PENDING", "RUNNING", "READY", "FAILED", "UNREACHABLE"]
    bytes_total: int | None = None
    bytes_from: BytesFrom = BytesFrom()
    error: ErrorBody | None = None


class Prefetch(OperationModel):
    """A recorded prefetch: READY when all nodes are, FAILED when all ended and some are not."""

    status: Literal["RUNNING", "READY", "FAILED"]
    request: PrefetchRequest
    manifests: list[str]
    sources: list[str]
    nodes: list[PrefetchNode]


class PrefetchCommand(BaseModel):
    """What the mirror asks an agent to obtain and to keep, as far as its cache goes; the grant names it."""

    id: str
    grant: str


class PrefetchReport(BaseModel):
    """How far an agent is."""

    bytes_total: Quantity | None = None
    bytes_from: BytesFrom = BytesFrom()


Outcome = Literal["damaged", "repaired", "lost"]
LISTED: Final = 500  # by each who reads: a disk may lose a million files, and a heartbeat has to fit into a request


class VerificationRequest(
    SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model", "tier": "node"}]}
):
    """Exactly one of ``source``, ``manifest`` and ``all`` says what; the rest narrows where. Without ``repair`` it only looks."""

    selectors = ("source", "manifest", "all")

    source: _Source | None = None
    manifest: _Name | None = None
    all: StrictBool = False
    tier: Tier | None = None
    cluster: _Name | None = None
    node: _Name | None = None
    repair: StrictBool = True


class PathVerificationRequest(
    StrictModel, json_schema_extra={"examples": [{"path": "/app/models/model/config.json", "repair": False}]}
):
    """To one agent: verify a file of a view, or everything below a folder of it, where the job sees it."""

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    repair: StrictBool = True


class DamagedItem(BaseModel):
    """One chunk that was not what its name says.

    ``repaired``: the right bytes are there again. ``damaged``: nothing was repaired, because nobody asked for it or, of a staged
    copy, because they could not be obtained. ``lost``: likewise; the file is not served any more, and will be filled again when
    a stage asks for it. So is a chunk of the cluster tier when somebody wants it.
    """

    tier: Tier
    cluster: Label | None = None
    node: Label | None = None
    manifest: Label | None = None
    sources: Locators = []
    path: Text | None = None  # of one file that contains it, in the manifest or, of a staged copy, on the node
    chunk: Label
    outcome: Outcome
    reason: Text


class Verification(OperationModel):
    """A recorded verification. DAMAGED: something was wrong and is not repaired."""

    status: Literal["RUNNING", "DONE", "DAMAGED", "FAILED"]
    request: VerificationRequest
    items: list[DamagedItem] = []
    chunks_read: int = 0
    bytes_read: int = 0
    unreachable: list[str] = []
    error: ErrorBody | None = None


class VerifyCommand(BaseModel):
    """What the mirror asks an agent to verify; ``tier`` is ``node`` or ``cluster``, null means both.

    ``grants`` are for what is to be fetched again, where no stage of the agent has one that is still good.
    """

    id: str
    tier: Tier | None = None
    manifests: list[str] | None = None
    all: bool = False
    repair: bool = True
    grants: list[str] = []


class VerifyReport(BaseModel):
    """What an agent has read, and what was wrong."""

    items: Annotated[list[DamagedItem], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    chunks_read: Quantity = 0
    bytes_read: Quantity = 0


class PathVerification(VerifyReport):
    """An agent's answer to a ``PathVerificationRequest``; ``id`` is the path."""

    id: str
    error: ErrorBody | None = None


def listed(items: Sequence[DamagedItem], *, before: int = 0) -> tuple[list[DamagedItem], ErrorBody | None]:
    """As many as are told, and the error that says so when there are more. ``before`` have been told already.

    Then the verification has not done what it was asked for: nobody hears what became of the rest.
    """
    total = before + len(items)
    if total <= LISTED:
        return list(items), None
    return list(items[: max(0, LISTED - before)]), body_of(
        LimitExceededError("damaged chunks that are listed", total, LISTED)
    )


class CollectionRequest(StrictModel, json_schema_extra={"examples": [{"dry_run": True}]}):
    """``grace_seconds`` instead of the mirror's own; ``dry_run`` only tells what would go.

    ``orphans``: only chunks that the database has no row for, and what was left half-written.
    """

    grace_seconds: Annotated[float, Field(ge=0, le=10 * 365 * 86400)] | None = None
    dry_run: StrictBool = False
    orphans: StrictBool = False


class CollectedKind(BaseModel):
    """How many of one kind went, and the bytes that became free. Those of manifests and evidence are the bytes of their chunks."""

    kind: Kind
    count: int
    bytes: int


class Collection(OperationModel):
    """A recorded collection. ``bytes_freed`` is what a dry run would free."""

    status: Literal["RUNNING", "DONE", "FAILED"]
    request: CollectionRequest
    kinds: list[CollectedKind] = []
    bytes_freed: int = 0
    error: ErrorBody | None = None


class RestorationRequest(SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model@main"}]}):
    """Exactly one of ``manifest`` and ``source``, which means all its revisions unless it names one."""

    selectors = ("manifest", "source")

    manifest: _Name | None = None
    source: _Source | None = None


class RestoredItem(BaseModel):
    """A manifest that can be read again."""

    manifest: str
    sources: list[str] = []
