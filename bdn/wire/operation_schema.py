"""Operations of the mirror: evictions, prefetches, verifications, collections, and the commands to agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Exactly one of ``source``, ``manifest``, ``job``, ``lru_bytes``, ``all`` selects what; other fields narrow where.

    ``lru_bytes`` frees that much on each selected tier, and spares the mirror unless ``tier`` names it. ``purge``: what
    the mirror evicts cannot be restored and is collected at once, earlier evictions included. The mirror evicts pushed
    manifests only by ``manifest`` or by a ``bt://`` source. ``plan`` is the id of a dry run: ``force`` then breaks the
    leases of the holders that it named, and manifests with others are refused.
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
    plan: _Name | None = None
    purge: StrictBool = False

    def check(self) -> None:
        """Reject zero or several selectors, and a purge of a cache: caches free evicted bytes at once anyway."""
        super().check()
        if self.purge and self.tier in ("node", "cluster"):
            raise InvalidRequestError("purge is for the mirror's store: leave out the tier, or name the tier mirror")
        if self.plan is not None and (self.dry_run or not self.force):
            raise InvalidRequestError("a plan names the holders that force ends: add force, and leave out dry_run")


class EvictedItem(BaseModel):
    """One manifest on one tier: evicted (planned, in a dry run), or refused because of its holders.

    What the mirror evicts can be restored until ``restorable_until``; ``bytes`` are free once it is collected after
    that.
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

    ``bytes_kept`` of them remain on the mirror's disk until the first collection after ``kept_until``, and can be
    restored until then. ``skipped_pushed`` counts the pushed manifests, ``skipped_pushed_bytes`` in total, that the
    mirror did not evict because they have no upstream and the selector does not name them.
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
        """For tenants: omits jobs, which may belong to other organisations."""
        items = [item.model_copy(update={"holders": []}) for item in self.items]
        return self.model_copy(update={"items": items})


class EvictCommand(BaseModel):
    """The mirror's command to an agent to evict. The mirror has resolved sources to manifests.

    ``tier`` is ``node`` or ``cluster``; null means both, and ``lru_bytes`` is then freed on each. ``asked_by`` names
    the caller and its organisation for the agent's events. With a ``plan``, ``holders`` are those that it named here.
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
    plan: str | None = None
    holders: list[str] = []
    purge: bool = False
    asked_by: str = "an operator"
    organisation: str | None = None

    def in_the_way(self, holders: Iterable[str]) -> list[str]:
        """The holders whose leases the eviction respects: all without force, with a plan those that it did not name."""
        if not self.force:
            return list(holders)
        return [] if self.plan is None else [one for one in holders if one not in self.holders]


class EvictReport(BaseModel):
    """The manifests that an agent evicted or refused to evict."""

    items: Annotated[list[EvictedItem], Field(max_length=MOST_LISTED, fail_fast=True)] = []


class PrefetchRequest(
    SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model@main", "cluster": "gpus"}]}
):
    """Exactly one of ``mirror_id``, ``manifest`` and ``source`` selects what; ``cluster`` and ``nodes`` select where.

    A source means its last mirrored manifests. Nodes without a cluster match by name in every cluster; a cluster
    without nodes means all of its live nodes.
    """

    selectors = ("mirror_id", "manifest", "source")

    mirror_id: _Name | None = None
    manifest: _Name | None = None
    source: _Source | None = None
    cluster: _Name | None = None
    nodes: Annotated[list[_Name], Field(max_length=10_000, fail_fast=True)] = []

    def check(self) -> None:
        """Reject zero or several selectors, and a request without cluster and nodes."""
        super().check()
        if self.cluster is None and not self.nodes:
            raise InvalidRequestError("name the target: cluster, nodes or both")


class PrefetchNode(BaseModel):
    """One node's part, as of its agent's last report. UNREACHABLE: no heartbeat of the agent for two minutes."""

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
    """The mirror's command to an agent to fill and hold the grant's manifests, as far as its cache allows."""

    id: str
    grant: str


class PrefetchReport(BaseModel):
    bytes_total: Quantity | None = None
    bytes_from: BytesFrom = BytesFrom()


Outcome = Literal["damaged", "repaired", "lost"]
LISTED: Final = (
    500  # by each tier that verifies: a disk may lose a million files, and a heartbeat must fit into a request
)


class VerificationRequest(
    SelectingModel, json_schema_extra={"examples": [{"source": "hf://org/model", "tier": "node"}]}
):
    """Exactly one of ``source``, ``manifest``, ``all`` selects what, other fields where. No ``repair``: read-only."""

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
    """To one agent: verify a file of a view, or everything below a folder of it, by the path that the job sees."""

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    repair: StrictBool = True


class DamagedItem(BaseModel):
    """One chunk whose bytes do not match its name.

    ``repaired``: the right bytes are back. ``damaged``: not repaired, because repair was not requested or, for a staged
    copy, because the right bytes could not be obtained. ``lost``: not repaired for the same reasons; the file is not
    served any more, and is filled again when a stage requests it, a chunk of the cluster tier when any agent requests
    it.
    """

    tier: Tier
    cluster: Label | None = None
    node: Label | None = None
    manifest: Label | None = None
    sources: Locators = []
    path: Text | None = None  # of one file that contains it, in the manifest or, for a staged copy, on the node
    chunk: Label
    outcome: Outcome
    reason: Text


class Verification(OperationModel):
    """A recorded verification. DAMAGED: damage was found that is not repaired."""

    status: Literal["RUNNING", "DONE", "DAMAGED", "FAILED"]
    request: VerificationRequest
    items: list[DamagedItem] = []
    chunks_read: int = 0
    bytes_read: int = 0
    unreachable: list[str] = []
    error: ErrorBody | None = None


class VerifyCommand(BaseModel):
    """The mirror's command to an agent to verify; ``tier`` is ``node`` or ``cluster``, null means both.

    ``grants`` are for fetching damaged chunks again if no stage of the agent has a valid grant.
    """

    id: str
    tier: Tier | None = None
    manifests: list[str] | None = None
    all: bool = False
    repair: bool = True
    grants: list[str] = []


class VerifyReport(BaseModel):
    """What an agent has read, and the damage that it found."""

    items: Annotated[list[DamagedItem], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    chunks_read: Quantity = 0
    bytes_read: Quantity = 0


class PathVerification(VerifyReport):
    """An agent's answer to a ``PathVerificationRequest``; ``id`` is the path."""

    id: str
    error: ErrorBody | None = None


def listed(items: Sequence[DamagedItem], *, before: int = 0) -> tuple[list[DamagedItem], ErrorBody | None]:
    """As many items as are listed, and an error if there are more. ``before`` were listed already.

    The error marks the verification as incomplete: the outcome of the remaining items is not reported.
    """
    total = before + len(items)
    if total <= LISTED:
        return list(items), None
    return list(items[: max(0, LISTED - before)]), body_of(
        LimitExceededError("damaged chunks that are listed", total, LISTED)
    )


class CollectionRequest(StrictModel, json_schema_extra={"examples": [{"dry_run": True}]}):
    """``grace_seconds`` replaces the mirror's own; ``dry_run`` deletes nothing.

    ``orphans``: only chunks without a row in the database, and half-written objects.
    """

    grace_seconds: Annotated[float, Field(ge=0, le=10 * 365 * 86400)] | None = None
    dry_run: StrictBool = False
    orphans: StrictBool = False


class CollectedKind(BaseModel):
    """How many of one kind were deleted, and the bytes freed; for manifests and evidence, the bytes of their chunks."""

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
    """Exactly one of ``manifest`` and ``source``; a source without a revision means all its revisions."""

    selectors = ("manifest", "source")

    manifest: _Name | None = None
    source: _Source | None = None


class RestoredItem(BaseModel):
    """A manifest that can be read again."""

    manifest: str
    sources: list[str] = []
