"""A job's nodes as the page shows them, the slowest first: from its ranks, from its stages, or from both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.units import format_age, format_duration, format_size
from bdn.mirror.page.remedies import REMEDIES, Problem, problem_of
from bdn.wire.stage_schema import JobStage, StageState
from bdn.wire.training_schema import RankDocument

_ORDER: Final[dict[StageState, int]] = {"FAILED": 0, "PENDING": 1, "STAGING": 1, "READY": 2, "RELEASED": 3}
_UNFINISHED: Final = ("PENDING", "STAGING")


@dataclass(frozen=True, slots=True)
class NodeLine:
    """``percent`` is None until the bytes are known. ``silent`` is the age of the last heartbeat of a node without one."""

    cluster: str | None
    node: str
    rank: int | None
    state: str
    percent: int | None
    bytes: str
    rate: str | None
    left: str | None
    silent: str | None
    exit_code: int | None
    problem: Problem | None

    @property
    def is_staging(self) -> bool:
        return self.state in _UNFINISHED

    @property
    def sentence(self) -> str:
        """What makes it the slowest."""
        place = self.node if self.cluster is None else f"{self.cluster}/{self.node}"
        rank = "" if self.rank is None else f" (rank {self.rank})"
        part = "nothing staged yet" if self.percent is None else f"{self.percent} % of its bytes"
        pace = f", {self.rate}" if self.rate else ""
        left = f", {self.left} left" if self.left else ""
        silent = f"; its last heartbeat was {self.silent}" if self.silent else ""
        return f"The slowest node is {place}{rank}: {part}{pace}{left}{silent}."


def lines_of_ranks(
    ranks: Sequence[RankDocument], cluster: str | None, stages: Mapping[tuple[str, str], JobStage], now: float
) -> list[NodeLine]:
    """``stages`` by cluster and node: newer than the reports of ranks that stage."""

    def of_rank(rank: RankDocument) -> JobStage | None:
        return stages.get((cluster or "", rank.node)) if rank.state == "STAGING" else None

    def order(rank: RankDocument) -> tuple[bool, float, int]:
        done, total = _figures(rank, of_rank(rank))
        return rank.state != "STAGING", _part(done, total), rank.rank

    return [_of_rank(rank, cluster, of_rank(rank), now) for rank in sorted(ranks, key=order)]


def lines_of_stages(stages: Sequence[JobStage], now: float) -> list[NodeLine]:
    """Failed ones first, then by the part that is staged, as ``GET /stages``."""
    ordered = sorted(stages, key=lambda one: (_ORDER[one.state], _part(one.bytes_done, one.bytes_total), one.node))
    return [_of_stage(stage, now) for stage in ordered]


def slowest(lines: Sequence[NodeLine]) -> NodeLine | None:
    return next((line for line in lines if line.is_staging), None)


def _figures(rank: RankDocument, stage: JobStage | None) -> tuple[int, int | None]:
    return (rank.bytes_done, rank.bytes_total) if stage is None else (stage.bytes_done, stage.bytes_total)


def _of_rank(rank: RankDocument, cluster: str | None, stage: JobStage | None, now: float) -> NodeLine:
    done, total = _figures(rank, stage)
    left = rank.eta_seconds if stage is None else stage.eta_seconds
    return NodeLine(
        cluster=cluster,
        node=rank.node,
        rank=rank.rank,
        state=rank.state,
        percent=_percent(done, total),
        bytes=_bytes(done, total),
        rate=_rate(stage),
        left=None if left is None else format_duration(left),
        silent=_silent(stage, now),
        exit_code=rank.exit_code,
        problem=problem_of(rank.error),
    )


def _of_stage(stage: JobStage, now: float) -> NodeLine:
    return NodeLine(
        cluster=stage.cluster,
        node=stage.node,
        rank=None,
        state=stage.state,
        percent=_percent(stage.bytes_done, stage.bytes_total),
        bytes=_bytes(stage.bytes_done, stage.bytes_total),
        rate=_rate(stage) if stage.state in _UNFINISHED else None,
        left=None if stage.eta_seconds is None else format_duration(stage.eta_seconds),
        silent=_silent(stage, now),
        exit_code=None,
        problem=Problem(stage.error, "The stage failed.", REMEDIES.get(stage.error, "")) if stage.error else None,
    )


def _part(done: int, total: int | None) -> float:
    return min(1.0, done / total) if total else float(total == 0)


def _percent(done: int, total: int | None) -> int | None:
    return None if total is None else int(100 * _part(done, total))


def _bytes(done: int, total: int | None) -> str:
    return format_size(done) if total is None else f"{format_size(done)} of {format_size(total)}"


def _rate(stage: JobStage | None) -> str | None:
    return None if stage is None or stage.bytes_per_second is None else f"{format_size(stage.bytes_per_second)}/s"


def _silent(stage: JobStage | None, now: float) -> str | None:
    return None if stage is None or stage.alive else format_age(max(0.0, now - stage.reported_at.timestamp()))
