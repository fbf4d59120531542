"""Verifications: what is held is read again, compared with its names, and repaired."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.wire.errors import ErrorBody, body_of
from bdn.wire.eviction_schema import Tier
from bdn.wire.http_fields import LONGEST_SOURCE
from bdn.wire.quantities import Quantity

VerificationStatus = Literal["RUNNING", "DONE", "DAMAGED", "FAILED"]
Outcome = Literal["damaged", "repaired", "lost"]
LISTED: Final = (
    500  # by each who reads: a disk may have lost a million files, and a heartbeat has to fit into a request
)


class VerificationRequest(BaseModel):
    """Exactly one of ``source``, ``manifest`` and ``all`` says what; the rest narrows where. Without ``repair`` it only looks."""

    model_config = ConfigDict(extra="forbid")

    source: Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)] | None = None
    manifest: StrictStr | None = None
    all: StrictBool = False
    tier: Tier | None = None
    cluster: StrictStr | None = None
    node: StrictStr | None = None
    repair: StrictBool = True

    def check(self) -> None:
        """Refuse a selector that says nothing or several things."""
        given = [name for name in ("source", "manifest") if getattr(self, name) is not None]
        if self.all:
            given.append("all")
        if len(given) != 1:
            msg = f"select by exactly one of source, manifest and all, not by {given or 'nothing'}"
            raise InvalidRequestError(msg)


class PathVerificationRequest(BaseModel):
    """To one agent: verify a file of a view, or everything below a folder of it, where the job sees it."""

    model_config = ConfigDict(extra="forbid")

    path: Annotated[StrictStr, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    repair: StrictBool = True


class DamagedItem(BaseModel):
    """One chunk that was not what its name says.

    ``repaired``: the right bytes are there again. ``damaged``: nothing was repaired, because nobody asked for it or, of a staged
    copy, because they could not be obtained. ``lost``: likewise; the file is not served any more, and will be filled again when
    a stage asks for it. So is a chunk of the cluster tier when somebody wants it.
    """

    tier: Tier
    cluster: str | None = None
    node: str | None = None
    manifest: str | None = None
    sources: list[str] = []
    path: str | None = None  # of one file that contains it, in the manifest or, of a staged copy, on the node
    chunk: str
    outcome: Outcome
    reason: str


class Verification(BaseModel):
    """A recorded verification. DAMAGED: something was wrong and is not repaired."""

    id: str
    status: VerificationStatus
    created_at: datetime
    completed_at: datetime | None = None
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

    items: list[DamagedItem] = []
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
