"""The stages of a job on all nodes, as the nodes' last heartbeats described them: their readers and their order."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bdn.mirror.access.callers import Caller
from bdn.mirror.db import agents, mirrors, training
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.db.mirrors import MirrorOwner
from bdn.mirror.db.tables import AgentRow
from bdn.wire.access_schema import Role
from bdn.wire.shapes import moment
from bdn.wire.stage_schema import JobStage, StageReport, StageState

Place = tuple[str, str]  # of a stage in the order of the listing
_ORDER: Final[dict[StageState, int]] = {"FAILED": 0, "PENDING": 1, "STAGING": 1, "READY": 2, "RELEASED": 3}


@dataclass(frozen=True)
class JobStages:
    """The service behind ``GET /stages``."""

    database: Database

    async def of(
        self, caller: Caller, job: str, after: Place | None = None, limit: int = 1000
    ) -> tuple[list[JobStage], Place | None]:
        """A page of the job's stages, slowest first, and the cursor of the next page.

        First those that FAILED, then those at work by the part that is filled, then those that are READY. An operator
        sees the stages of all organisations; other callers the stages of mirrors or training jobs that they may see. A stage that
        moves back in this order meanwhile may come on two pages.
        """
        now = self.database.now()
        async with self.database.read() as session:
            said = await agents.stages_of(session, job, now - agents.FORGOTTEN_SECONDS)
            found = [(row, StageReport.model_validate(stage)) for row, stage in said]
            # Also without any, so that a job of another organisation costs what none costs.
            owners = await mirrors.owners(session, {report.mirror_id for _, report in found if report.mirror_id})
            shown = await self._shown(session, caller, job, owners)
        if caller.role is not Role.OPERATOR:
            found = [(row, report) for row, report in found if report.mirror_id in shown]
        placed = {_place(row, report): (row, report) for row, report in found}
        places = sorted(place for place in placed if after is None or place > after)
        page = [placed[place] for place in places[:limit]]
        documents = [_document(row, report, owners.get(report.mirror_id or ""), now) for row, report in page]
        return documents, places[limit - 1] if len(places) > limit else None

    async def on_node(self, caller: Caller, cluster: str, node: str) -> list[JobStage]:
        """The stages of one node, in the order of ``of``. ``caller`` is of all teams; an operator sees all of them."""
        now = self.database.now()
        async with self.database.read() as session:
            row = await agents.who_is(session, cluster, node)
            found = [StageReport.model_validate(one) for one in (row and row.stages) or ()]
            owners = await mirrors.owners(session, {report.mirror_id for report in found if report.mirror_id})
        own = {mirror for mirror, owner in owners.items() if owner.organisation == caller.organisation}
        shown = [one for one in found if caller.role is Role.OPERATOR or one.mirror_id in own]
        if row is None:
            return []
        stages = [_document(row, report, owners.get(report.mirror_id or ""), now) for report in shown]
        return sorted(stages, key=lambda stage: (_ORDER[stage.state], stage.id))

    @staticmethod
    async def _shown(session: ReadSession, caller: Caller, job: str, owners: dict[str, MirrorOwner]) -> Collection[str]:
        """The mirrors of ``owners`` that the caller may see, or that are of the training job, if it may see that."""
        own = {
            mirror
            for mirror, owner in owners.items()
            if owner.organisation == caller.organisation and caller.team in (None, owner.team)
        }
        jobs = await training.listed(session, caller.organisation, caller.team, job=job)
        return own | {state.row.mirror_id for state in jobs if state.row.mirror_id in owners}


def _document(row: AgentRow, report: StageReport, owner: MirrorOwner | None, now: float) -> JobStage:
    left = None if report.bytes_total is None else max(0, report.bytes_total - report.bytes_done)
    rate = report.bytes_per_second
    is_at_work = _ORDER[report.state] == _ORDER["STAGING"]
    return JobStage(
        cluster=row.cluster,
        node=row.node,
        alive=agents.is_alive(row, now),
        reported_at=moment(row.last_heartbeat),
        organisation=None if owner is None else owner.organisation,
        eta_seconds=left / rate if is_at_work and rate and left is not None else None,
        **report.model_dump(exclude={"since"}),
        since=moment(report.since),
    )


def _place(row: AgentRow, report: StageReport) -> Place:
    """Where a stage is in the listing; unique."""
    part = min(1.0, report.bytes_done / report.bytes_total) if report.bytes_total else 0.0
    return f"{_ORDER[report.state]} {part:.6f}", f"{row.cluster}/{row.node}/{report.id}"
