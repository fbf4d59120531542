"""What heartbeats say of stages."""

import time
from typing import Final

from bdn.wire.progress import total_of
from bdn.wire.stage_schema import MANIFESTS_REPORTED, STAGES_REPORTED, StageReport
from node_agent.stage.stage import NodeStage, StageRegistry

_ENDED_SECONDS: Final = 60.0
_LONGEST_JOB: Final = 4096  # of a pull: its directory


def stage_reports(registry: StageRegistry, now: float) -> list[StageReport]:
    """The 50 newest stages at work, and as far as there is room those that are READY or FAILED for less than a minute.

    ``now``: in seconds since the epoch.
    """
    shown = [stage for stage in registry.all() if not stage.is_terminal or _ended_at(stage, now) > now - _ENDED_SECONDS]
    shown.sort(key=lambda stage: stage.is_terminal)
    return [_report(stage) for stage in shown[:STAGES_REPORTED]]


def _ended_at(stage: NodeStage, now: float) -> float:
    """When the stage became READY or FAILED; long ago if it is released. A clock that was set back does not keep it."""
    record = stage.record
    at = {"READY": record.ready_at, "FAILED": record.ended_at}.get(record.state)
    return 0.0 if at is None or at > now else at


def _report(stage: NodeStage) -> StageReport:
    record, rate = stage.record, stage.bytes_per_second(time.monotonic())
    ended_at = record.ready_at if record.state == "READY" else record.ended_at
    return StageReport(
        id=record.id,
        job=record.job_id[:_LONGEST_JOB],
        mirror_id=record.mirror_id,
        manifests=list(dict.fromkeys(mount.manifest for mount in record.mounts))[:MANIFESTS_REPORTED],
        state=stage.state,
        bytes_done=sum(one.total for one in stage.bytes_from()),
        bytes_total=total_of([mount.bytes_total for mount in record.mounts]),
        bytes_per_second=None if rate is None else round(rate),
        since=max(0.0, (ended_at if stage.is_terminal else stage.began_at) or record.created_at),
        error=record.error.code if record.error and record.state == "FAILED" else None,
    )
