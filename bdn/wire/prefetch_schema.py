"""Prefetches: manifests that are placed on nodes before any job asks for them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from bdn.core.errors import InvalidRequestError
from bdn.wire.errors import ErrorBody
from bdn.wire.http_fields import LONGEST_SOURCE
from bdn.wire.quantities import Quantity
from bdn.wire.stage_schema import BytesFrom

PrefetchStatus = Literal["RUNNING", "READY", "FAILED"]
NodeState = Literal["PENDING", "RUNNING", "READY", "FAILED", "UNREACHABLE"]


class PrefetchRequest(BaseModel):
    """Exactly one of ``mirror_id``, ``manifest`` and ``source`` says what; ``cluster`` and ``nodes`` say where.

    A source means what it was last mirrored as. Nodes without a cluster are meant by their names in every cluster; a
    cluster without nodes means all of its nodes that live.
    """

    model_config = ConfigDict(extra="forbid")

    mirror_id: StrictStr | None = None
    manifest: StrictStr | None = None
    source: Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)] | None = None
    cluster: StrictStr | None = None
    nodes: Annotated[list[StrictStr], Field(max_length=10_000)] = []

    def check(self) -> None:
        """Refuse a request that says nothing or several things."""
        given = [name for name in ("mirror_id", "manifest", "source") if getattr(self, name) is not None]
        if len(given) != 1:
            msg = f"prefetch exactly one of mirror_id, manifest and source, not {given or 'nothing'}"
            raise InvalidRequestError(msg)
        if self.cluster is None and not self.nodes:
            raise InvalidRequestError("say where to: a cluster, or nodes")


class PrefetchNode(BaseModel):
    """One node's part, as its agent last reported it. UNREACHABLE: the agent has not been heard of for two minutes."""

    cluster: str
    node: str
    state: NodeState
    bytes_total: int | None = None
    bytes_from: BytesFrom = BytesFrom()
    error: ErrorBody | None = None


class Prefetch(BaseModel):
    """A recorded prefetch: READY when all nodes are, FAILED when all ended and some are not."""

    id: str
    status: PrefetchStatus
    created_at: datetime
    completed_at: datetime | None = None
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
