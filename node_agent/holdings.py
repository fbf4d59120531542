"""What this node holds, as it is told to the mirror and to people."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bdn.wire.mirror_schema import Holding
from bdn.wire.stage_schema import Cache
from node_agent.cache.node_cache import NodeCache
from node_agent.stage.book import StageBook


@dataclass(frozen=True)
class Holdings:
    """Documents about the cache."""

    cache: NodeCache
    book: StageBook

    def all(self) -> list[Holding]:
        """The held manifests, least recently used first. Sources are those of the stages that are known."""
        index = self.cache.index
        sources: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for stage in self.book.all():
            for mount in stage.record.mounts:
                sources[mount.manifest][mount.source] = None
        return [
            Holding(
                manifest=str(manifest),
                bytes=sum(index.ledger.size_of(content) or 0 for content in index.contents_of(manifest)),
                complete=index.is_complete(manifest),
                last_used=index.recency.last_used(manifest),
                sources=list(sources.get(str(manifest), ())),
                held_by=[holder.job_id for holder in index.leases.holders(manifest)],
            )
            for manifest in index.manifests()
        ]

    async def document(self) -> Cache:
        """``GET /cache``."""
        return Cache(tiers={"node": await self.cache.use()}, manifests=self.all())
