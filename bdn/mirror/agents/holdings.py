"""What is held where: the mirror's store and, from their heartbeats, the agents' caches."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.mirror.db import agents, contents, mirrors
from bdn.mirror.db.database import Database
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, Holding


@dataclass(frozen=True)
class HeldManifestsService:
    """The service behind ``GET /manifests``."""

    database: Database

    async def held(self, organisation: str) -> HeldManifests:
        """Every manifest of the organisation that some tier holds."""
        async with self.database.read() as session:
            sources = await mirrors.sources_by_manifest(session, organisation)
            readable = await mirrors.readable(session, organisation, list(sources))
            published = {
                digest: (files, size)
                for digest, files, size, _ in await contents.manifests(session)
                if digest in readable
            }
            rows = await agents.all_agents(session)
        nodes: dict[str, dict[str, Holding]] = {}
        for row in rows:
            for holding in map(Holding.model_validate, row.holdings):
                nodes.setdefault(holding.manifest.removeprefix("b3:"), {})[f"{row.cluster}/{row.node}"] = holding
        items: list[HeldManifest] = []
        for digest, names in sources.items():
            if digest not in published and digest not in nodes:
                continue
            files, size = published.get(digest, (None, None))
            items.append(
                HeldManifest(
                    manifest=f"b3:{digest}",
                    sources=names,
                    files_total=files,
                    bytes_total=size,
                    mirror=digest in published,
                    nodes=nodes.get(digest, {}),
                )
            )
        return HeldManifests(items=items)
