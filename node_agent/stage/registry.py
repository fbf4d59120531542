"""The stages that this node knows."""

from __future__ import annotations

from collections import Counter

from bdn.core.errors import NotFoundError
from node_agent.stage.stage import Stage


class StageBook:
    """Stages by id, in memory; their records are on disk."""

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    def all(self) -> list[Stage]:
        """Every stage, newest first; released ones are known for a week, the newest ten thousand of them."""
        return sorted(self._stages.values(), key=lambda stage: stage.record.created_at, reverse=True)

    def get(self, stage_id: str) -> Stage | None:
        """The stage, or None."""
        return self._stages.get(stage_id)

    def find(self, stage_id: str) -> Stage:
        """The stage, or ``NotFoundError``."""
        stage = self.get(stage_id)
        if stage is None:
            raise NotFoundError(f"stage {stage_id}")
        return stage

    def enter(self, stage: Stage) -> Stage:
        """Enter a stage; the one that is there already, if any, stays and is returned."""
        return self._stages.setdefault(stage.record.id, stage)

    def strike(self, stage: Stage) -> None:
        """Forget a stage."""
        if self._stages.get(stage.record.id) is stage:
            del self._stages[stage.record.id]

    def count_by_state(self) -> Counter[str]:
        """How many there are in each state."""
        return Counter(stage.record.state for stage in self._stages.values())
