"""A training job as the page shows it: phases, ranks with the slowest first, log lines and checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.printable import printable
from bdn.core.training.states import ACTIVE, Status
from bdn.core.units import format_size, format_time
from bdn.mirror.page.job_nodes import NodeLine, lines_of_ranks, slowest
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import Checkpoint
from bdn.wire.stage_schema import JobStage
from bdn.wire.training_schema import PREFIX, LogLine, RankDocument, TrainingJob

_PHASES: Final[tuple[Status, ...]] = (*ACTIVE, "COMPLETED")
_FAILED: Final = ("FAILED", "DEPLOY_FAILED", "STOPPED")
_NANOSECONDS: Final = 10**9
_LONGEST_LINE: Final = 2000  # characters
_LOG_CHARACTERS: Final = 64 * 1024
_PHASE_HINTS: Final[dict[str, str]] = {
    "CREATED": "its weights are mirrored",
    "PENDING": "it waits for nodes",
    "DEPLOYING": "its nodes stage the weights",
    "RUNNING": "its commands run",
}


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    is_current: bool
    is_past: bool


@dataclass(frozen=True, slots=True)
class Weights:
    source: str
    mount: str
    manifest: str | None


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    name: str
    rank: int
    size: str
    committed: str
    is_syncing: bool
    is_loadable: bool
    manifest: str


@dataclass(frozen=True, slots=True)
class LogText:
    at: str
    replica: str | None
    message: str


@dataclass(frozen=True, slots=True)
class JobView:
    """``answer`` names the slowest node, or what the job waits for or why it failed."""

    id: str
    name: str
    project: str
    project_id: str
    status: str
    is_active: bool
    is_stopping: bool
    needs: str
    nodes: int
    cluster: str | None
    mirror_id: str | None
    created: str
    phases: tuple[Phase, ...]
    answer: str
    ranks: tuple[NodeLine, ...]


def job_view(job: TrainingJob, now: float, stages: Sequence[JobStage] = ()) -> JobView:
    """``stages`` of the job, whose figures are newer than its ranks' reports."""
    status, own = job.current_status.removeprefix(PREFIX), job.bdn
    by_node = {(stage.cluster, stage.node): stage for stage in stages}
    ranks = lines_of_ranks(own.ranks, own.cluster, by_node, now)
    return JobView(
        id=job.id,
        name=job.name,
        project=job.training_project.name,
        project_id=job.training_project_id,
        status=status,
        is_active=status in ACTIVE,
        is_stopping=own.stopping,
        needs=job.instance_type.name,
        nodes=job.node_count,
        cluster=own.cluster,
        mirror_id=own.mirror_id,
        created=format_time(job.created_at.timestamp()),
        phases=_phases(status, own.ranks),
        answer=_answer(job, status, ranks),
        ranks=tuple(ranks),
    )


def weights_of(mirror: Mirror) -> list[Weights]:
    return [Weights(one.source, one.mount_location, one.manifest) for one in mirror.sources]


def checkpoint_lines(checkpoints: Iterable[Checkpoint]) -> list[CheckpointLine]:
    """Newest first, as given oldest first."""
    return [
        CheckpointLine(
            name=one.checkpoint_id,
            rank=one.rank,
            size=format_size(one.size_bytes),
            committed=format_time(one.committed_at.timestamp()),
            is_syncing=one.sync_status == "SYNCING",
            is_loadable=one.is_loadable,
            manifest=one.manifest,
        )
        for one in reversed(list(checkpoints))
    ]


def log_lines(newest_first: Sequence[LogLine]) -> list[LogText]:
    """Oldest first. Long lines are cut, and the oldest ones left out: a job writes what it likes."""
    lines: list[LogText] = []
    left = _LOG_CHARACTERS
    for line in newest_first:
        text = printable(line.message[:_LONGEST_LINE]) + ("…" if len(line.message) > _LONGEST_LINE else "")
        left -= len(text)
        if left < 0:
            break
        lines.append(LogText(format_time(int(line.timestamp) / _NANOSECONDS)[11:-1], line.replica, text))
    return lines[::-1]


def _phases(status: str, ranks: Sequence[RankDocument]) -> tuple[Phase, ...]:
    """The phases in order, up to the end that the job had."""
    if status in _FAILED:  # a job without ranks never left PENDING, and only a STOPPED or FAILED job may have run
        ran = status == "FAILED" or any(rank.state in ("RUNNING", "ENDED") for rank in ranks)
        names: tuple[str, ...] = (*(_PHASES[: 4 if ran else 3 if ranks else 2]), status)
    else:
        names = _PHASES
    position = names.index(status) if status in names else len(names)
    return tuple(Phase(name, number == position, number < position) for number, name in enumerate(names))


def _answer(job: TrainingJob, status: str, ranks: Sequence[NodeLine]) -> str:
    behind = slowest(ranks) if status == "DEPLOYING" else None
    if behind is not None:
        return behind.sentence
    if job.error_message is not None:
        return f"Waits: {job.error_message}." if status in ACTIVE else f"{job.error_message}."
    hint = _PHASE_HINTS.get(status)
    return f"Now {hint}." if hint else ""
