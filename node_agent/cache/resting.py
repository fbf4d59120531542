"""Space that was promised to files which nobody fills: given back, so that others can have it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bdn.core.cache.index import CacheIndex
from bdn.core.digest import Digest
from node_agent.background_tasks import in_thread
from node_agent.cache.removal import Removal


@dataclass(frozen=True)
class Resting:
    """The stages that hold leases, lack files and fill none. Under the cache's lock."""

    index: CacheIndex
    removal: Removal
    _stages: set[str] = field(default_factory=set)

    def begin(self, stage_id: str) -> None:
        """It fills nothing from now on."""
        self._stages.add(stage_id)

    def end(self, stage_id: str) -> None:
        """It fills again, or is gone."""
        self._stages.discard(stage_id)

    async def give_back(self, manifest: Digest, stage_id: str) -> None:
        """Promise no space any more to what of this manifest was never begun, unless another stage may be about to."""
        for content in await in_thread(self.removal.unbegun, self._reserved_for(manifest, stage_id)):
            self.index.lose(content)

    def _reserved_for(self, manifest: Digest, stage_id: str) -> list[Digest]:
        """What of it no other stage may be about to fill."""
        ledger = self.index.ledger
        if self.index.is_complete(manifest):
            return []
        return [
            content
            for content in self.index.contents_of(manifest)
            if ledger.size_of(content) is not None
            and not ledger.is_committed(content)
            and not any(self._is_filled_beside(name, stage_id) for name in self.index.named_by(content))
        ]

    def _is_filled_beside(self, manifest: Digest, stage_id: str) -> bool:
        holders = {holder.stage_id for holder in self.index.leases.holders(manifest)}
        return bool(holders - {stage_id} - self._stages)
