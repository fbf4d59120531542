"""Evictions across tiers: the selector, and what went or was refused."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from bdn.core.errors import InvalidRequestError
from bdn.wire.errors import ErrorBody
from bdn.wire.http_fields import LONGEST_SOURCE

Tier = Literal["node", "cluster", "mirror"]
EvictionStatus = Literal["RUNNING", "DONE", "REFUSED", "FAILED"]


class EvictionRequest(BaseModel):
    """Exactly one of ``source``, ``manifest``, ``job``, ``lru_bytes`` and ``all`` says what; the rest narrows where.

    ``lru_bytes`` frees that much on each tier that is selected, and spares the mirror unless ``tier`` names it.
    """

    model_config = ConfigDict(extra="forbid")

    source: Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)] | None = None
    manifest: StrictStr | None = None
    job: StrictStr | None = None
    lru_bytes: Annotated[int, Field(gt=0)] | None = None
    all: StrictBool = False
    tier: Tier | None = None
    cluster: StrictStr | None = None
    node: StrictStr | None = None
    dry_run: StrictBool = False
    force: StrictBool = False

    def check(self) -> None:
        """Refuse a selector that says nothing or several things."""
        given = [name for name in ("source", "manifest", "job", "lru_bytes") if getattr(self, name) is not None]
        if self.all:
            given.append("all")
        if len(given) != 1:
            msg = f"select by exactly one of source, manifest, job, lru_bytes and all, not by {given or 'nothing'}"
            raise InvalidRequestError(msg)


class EvictedItem(BaseModel):
    """One manifest on one tier: evicted (planned, in a dry run), or refused because of its holders.

    What the mirror evicts can be restored until ``restorable_until``; ``bytes`` are free once it is collected after that.
    """

    tier: Tier
    cluster: str | None = None
    node: str | None = None
    manifest: str
    sources: list[str] = []
    bytes: int
    refused: bool = False
    holders: list[str] = []
    restorable_until: datetime | None = None


class Eviction(BaseModel):
    """A recorded eviction. ``bytes_freed`` is what a dry run would free."""

    id: str
    status: EvictionStatus
    created_at: datetime
    completed_at: datetime | None = None
    request: EvictionRequest
    items: list[EvictedItem] = []
    unreachable: list[str] = []
    bytes_freed: int = 0
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
    tier: Tier | None = None
    manifests: list[str] | None = None
    job: str | None = None
    lru_bytes: int | None = None
    all: bool = False
    dry_run: bool = False
    force: bool = False
    asked_by: str = "somebody"
    organisation: str | None = None


class EvictReport(BaseModel):
    """What went on an agent, and what was refused."""

    items: list[EvictedItem] = []
