"""Collections and restorations: what goes out of the mirror's store, and what is brought back before it does."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from bdn.core.errors import InvalidRequestError
from bdn.core.store.collection import Kind
from bdn.wire.errors import ErrorBody
from bdn.wire.http_fields import LONGEST_SOURCE

CollectionStatus = Literal["RUNNING", "DONE", "FAILED"]


class CollectionRequest(BaseModel):
    """``grace_seconds`` instead of the mirror's own; ``dry_run`` only tells what would go."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[float, Field(ge=0, le=10 * 365 * 86400)] | None = None
    dry_run: StrictBool = False


class CollectedKind(BaseModel):
    """How many of one kind went, and the bytes that became free with them."""

    kind: Kind
    count: int
    bytes: int


class Collection(BaseModel):
    """A recorded collection. ``bytes_freed`` is what a dry run would free."""

    id: str
    status: CollectionStatus
    created_at: datetime
    completed_at: datetime | None = None
    request: CollectionRequest
    kinds: list[CollectedKind] = []
    bytes_freed: int = 0
    error: ErrorBody | None = None


class RestorationRequest(BaseModel):
    """Exactly one of ``manifest`` and ``source``, which means all its revisions unless it names one."""

    model_config = ConfigDict(extra="forbid")

    manifest: StrictStr | None = None
    source: Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)] | None = None

    def check(self) -> None:
        """Refuse a selector that says nothing or several things."""
        if (self.manifest is None) == (self.source is None):
            raise InvalidRequestError("select by exactly one of manifest and source")


class RestoredItem(BaseModel):
    """A manifest that can be read again."""

    manifest: str
    sources: list[str] = []


class Restoration(BaseModel):
    """What an eviction took from the mirror and was brought back, moving no bytes."""

    items: list[RestoredItem]
