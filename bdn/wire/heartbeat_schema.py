"""Heartbeats: an agent reports its state and its progress with commands; the reply contains further commands."""

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
from bdn.wire.run_schema import NodeCapacity, RunCommand, RunReport
from bdn.wire.shapes import MOST_FIELDS, MOST_LISTED, ErrorBody, Label, Locator, Number
from bdn.wire.stage_schema import STAGES_REPORTED, StageReport, TierUse


class Command(BaseModel):
    """The mirror's request to an agent: one of the fields beside ``id``. An agent that knows none reports an error."""

    id: str
    evict: EvictCommand | None = None
    prefetch: PrefetchCommand | None = None
    verify: VerifyCommand | None = None
    remove_cache: RemoveCacheCommand | None = None
    run: RunCommand | None = None


class Report(BaseModel):
    """An agent's progress with a command. The mirror repeats commands neither reported as ``running`` nor answered."""

    id: Label
    running: bool = False
    evict: EvictReport | None = None
    prefetch: PrefetchReport | None = None
    verify: VerifyReport | None = None
    remove_cache: RemoveCacheReport | None = None
    run: RunReport | None = None
    error: ErrorBody | None = None


class HoldingsChange(BaseModel):
    """An agent's holdings, as a change of its earlier holdings; large changes are sent in several parts.

    ``digest`` is the agent's name for its holdings after the change, and ``base`` for its holdings before it; null: all
    earlier reports are void. The mirror stores the name, and rejects a change whose base differs from it.
    """

    base: Annotated[str, Field(max_length=64)] | None
    digest: Annotated[str, Field(max_length=64)]
    held: Annotated[list[Holding], Field(max_length=MOST_LISTED, fail_fast=True)] = []
    gone: Annotated[list[ManifestName], Field(max_length=MOST_LISTED, fail_fast=True)] = []


class CacheUse(BaseModel):
    """A project whose training cache is mounted by job volumes of this node, with the ids ``holders``."""

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
}


class Heartbeat(BaseModel, json_schema_extra={"examples": [_EXAMPLE]}):
    """An agent's state. The mirror may hold the request open for ``wait_seconds`` until it has something to send.

    ``changes`` is null if nothing changed since the last answered heartbeat. ``epoch`` is the epoch of the members that
    the agent knows: the reply contains members only if they differ. ``volume_id`` names the volume that
    the agent shares with other agents of its cluster, null before its first use. ``unsynced_bytes`` counts bytes of
    checkpoints in its job volumes that are not pushed yet. ``caches`` are mounted now. ``capacity`` is null for agents
    that run no training jobs. ``stages`` are those at work, and those that ended in the last minute. ``leaving``: the
    agent's last heartbeat. ``events`` are recorded once the heartbeat is
    answered; the agent repeats them until then. ``state_at``: when the agent read this state, in seconds of its
    machine's monotonic clock, which a restart of the agent does not set back. A heartbeat that was delayed does not
    replace a later state of the same boot.
    """

    node: Annotated[str, Field(min_length=1, max_length=256)]
    cluster: Annotated[str, Field(min_length=1, max_length=256)]
    boot_id: Label
    roles: Annotated[list[Label], Field(max_length=MOST_FIELDS, fail_fast=True)]
    advertise: Locator | None
    version: Label
    tiers: Annotated[dict[Label, TierUse], Field(max_length=MOST_FIELDS)]
    changes: HoldingsChange | None = None
    reports: Annotated[list[Report], Field(max_length=10_000, fail_fast=True)] = []
    events: Annotated[list[NodeEvent], Field(max_length=EVENTS_AT_ONCE, fail_fast=True)] = []
    epoch: Number | None = None
    volume_id: VolumeId | None = None
    unsynced_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    caches: Annotated[list[CacheUse], Field(max_length=1000, fail_fast=True)] = []
    capacity: NodeCapacity | None = None
    stages: Annotated[list[StageReport], Field(max_length=STAGES_REPORTED, fail_fast=True)] = []
    leaving: bool = False
    state_at: Annotated[float, Field(ge=0, lt=2**63)] | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=30)] = 0


class MemberDocument(BaseModel):
    """One agent of the cluster, as its peers see it."""

    node: str
    advertise: str | None
    roles: list[str]


class HeartbeatReply(BaseModel):
    """Members of the cluster with their epoch, commands to carry out, and the public keys of grants.

    ``members`` is null if the agent's epoch is current. ``holdings_digest`` names the holdings that the mirror has of
    the agent, empty if it has none under a name; an agent with other holdings then reports all of them.
    """

    members: list[MemberDocument] | None
    epoch: int
    pending: list[Command] = []
    public_keys: list[dict[str, Any]]
    interval_seconds: float
    holdings_digest: str


class AgentDocument(BaseModel):
    """One agent, as of its last heartbeat. ``disputed``: another agent reports under the same name.

    ``left_at`` is set if the agent is not alive because it announced its departure.
    ``unsynced_bytes`` of checkpoints would be lost with the node now.
    """

    node: str
    cluster: str
    roles: list[str]
    version: str
    advertise: str | None
    tiers: dict[str, TierUse]
    last_heartbeat: datetime
    alive: bool
    left_at: datetime | None = None
    disputed: bool = False
    manifests: int
    unsynced_bytes: int = 0


class Cluster(BaseModel):
    """Totals over the agents of one cluster."""

    cluster: str
    epoch: int
    agents: int
    agents_alive: int
    tiers: dict[str, TierUse]
