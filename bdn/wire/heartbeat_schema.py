"""Heartbeats: an agent reports itself, and how far it is with commands; the answer brings further commands."""

from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, JsonValue

from bdn.wire.cache_schema import ProjectId, RemoveCacheCommand, RemoveCacheReport, VolumeId
from bdn.wire.event_schema import EVENTS_AT_ONCE, NodeEvent
from bdn.wire.mirror_schema import Holding, ManifestName
from bdn.wire.operation_schema import (
    EvictCommand,
    EvictReport,
    PrefetchCommand,
    PrefetchReport,
    VerifyCommand,
    VerifyReport,
)
from bdn.wire.shapes import MOST_FIELDS, MOST_LISTED, ErrorBody, Label, Locator, Number
from bdn.wire.stage_schema import TierUse


class Command(BaseModel):
    """What the mirror asks of an agent: one of the fields beside ``id``. An agent that knows none of them answers an error."""

    id: str
    evict: EvictCommand | None = None
    prefetch: PrefetchCommand | None = None
    verify: VerifyCommand | None = None
    remove_cache: RemoveCacheCommand | None = None


class Report(BaseModel):
    """How far an agent is with a command. The mirror repeats what is neither reported as ``running`` nor answered."""

    id: Label
    running: bool = False
    evict: EvictReport | None = None
    prefetch: PrefetchReport | None = None
    verify: VerifyReport | None = None
    remove_cache: RemoveCacheReport | None = None
    error: ErrorBody | None = None


class HoldingsChange(BaseModel):
    """What an agent holds now, as a change of what it held; large ones come one after the other.

    ``digest`` is the agent's name for all that it holds after the change, and ``base`` for what it held before; null: nothing
    that was told before counts. The mirror keeps the name, and takes up no change of something else than it has.
    """

    base: Annotated[str, Field(max_length=64)] | None
    digest: Annotated[str, Field(max_length=64)]
    held: Annotated[list[Holding], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    gone: Annotated[list[ManifestName], Field(max_length=MOST_LISTED, fail_fast=True)] = []


class CacheUse(BaseModel):
    """A project whose training cache job volumes of this node have mounted. ``holders`` are their ids."""

    project: ProjectId
    holders: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=1000, fail_fast=True)]


_EXAMPLE: Final[dict[str, JsonValue]] = {
    "node": "node-1",
    "cluster": "gpus",
    "boot_id": "3f8e",
    "roles": ["node"],
    "advertise": "10.0.0.1:8461",
    "version": "0.1.0",
    "tiers": {},
    "holdings": [],
}


class Heartbeat(BaseModel, json_schema_extra={"examples": [_EXAMPLE]}):
    """An agent's state. The mirror may keep the request open for ``wait_seconds`` until it has something to say.

    ``changes`` is null when nothing changed since the last heartbeat that was answered. ``holdings`` is all that is held, from
    agents of the version before, and for mirrors that tell no ``holdings_digest``. ``epoch`` is of the members that
    the agent knows: they are not repeated to it, and it is told when there are others. ``volume_id`` is that of the volume that it
    shares with others of its cluster, and null before that is used. ``unsynced_bytes`` are of checkpoints in its job volumes that were not pushed yet. ``caches`` are mounted now. ``leaving`` is its last word. ``events``
    are recorded once the heartbeat is answered; the agent repeats them until then.
    """

    node: Annotated[str, Field(min_length=1, max_length=256)]
    cluster: Annotated[str, Field(min_length=1, max_length=256)]
    boot_id: Label
    roles: Annotated[list[Label], Field(max_length=MOST_FIELDS, fail_fast=True)]
    advertise: Locator | None
    version: Label
    tiers: Annotated[dict[Label, TierUse], Field(max_length=MOST_FIELDS)]
    holdings: Annotated[list[Holding], Field(max_length=MOST_LISTED, fail_fast=True)] | None
    changes: HoldingsChange | None = None
    reports: Annotated[list[Report], Field(max_length=10_000, fail_fast=True)] = []
    events: Annotated[list[NodeEvent], Field(max_length=EVENTS_AT_ONCE, fail_fast=True)] = []
    epoch: Number | None = None
    volume_id: VolumeId | None = None
    unsynced_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    caches: Annotated[list[CacheUse], Field(max_length=1000, fail_fast=True)] = []
    leaving: bool = False
    wait_seconds: Annotated[float, Field(ge=0, le=30)] = 0


class MemberDocument(BaseModel):
    """One agent of the cluster, as its peers see it."""

    node: str
    advertise: str | None
    roles: list[str]


class HeartbeatReply(BaseModel):
    """Members of the cluster with their epoch, commands to carry out, and the keys that grants are verified with.

    ``members`` is null when they are those of the epoch that the agent knows. ``holdings_digest`` names what the mirror has of
    the agent's holdings, and is empty when it has none by a name; where the agent held something else, it tells all again. ``commands`` is always empty: agents of the
    version before read evictions there, and would take any other command for an eviction of nothing.
    """

    members: list[MemberDocument] | None
    epoch: int
    pending: list[Command] = []
    commands: Annotated[list[Command], Field(max_length=0)] = []
    public_keys: list[dict[str, Any]]
    interval_seconds: float
    holdings_digest: str | None = None


class AgentDocument(BaseModel):
    """One agent, as the mirror last heard of it. ``disputed``: another one reports under the same name.

    ``unsynced_bytes`` of checkpoints would go with the node if it were lost now.
    """

    node: str
    cluster: str
    roles: list[str]
    version: str
    advertise: str | None
    tiers: dict[str, TierUse]
    last_heartbeat: datetime
    alive: bool
    disputed: bool = False
    manifests: int
    unsynced_bytes: int = 0


class Cluster(BaseModel):
    """The agents of one cluster together."""

    cluster: str
    epoch: int
    agents: int
    agents_alive: int
    tiers: dict[str, TierUse]
