"""What is held where, and what a digest or a source stands for, to an organisation."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.store import MirrorStore
from bdn.mirror.db import agents, contents, mirrors, origins
from bdn.mirror.db.database import Database, ReadSession, batches
from bdn.mirror.db.origins import Place
from bdn.wire.event_schema import Named, NamedKind, NamedPlace
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, StoreUse
from bdn.wire.shapes import moment

_SHOWN: Final = 100  # files whose paths are told
_HOLDINGS: Final = 1000  # of one page: a thousand agents may hold each manifest
_COUNTED: Final = 50  # manifests whose holders are counted at once


@dataclass(frozen=True)
class Names:
    """The service behind ``GET /manifests`` and ``GET /names``."""

    database: Database
    store: MirrorStore
    tombstone_seconds: float

    async def held(self, organisation: str, after: str, limit: int) -> HeldManifests:
        """The manifests of the organisation that some tier holds, from the first one after this; as many as fit into a page."""
        async with self.database.read() as session:
            digests = await mirrors.mirrored_after(session, organisation, after, limit + 1)
            shown = await self._page(session, digests[:limit])
            sources = await mirrors.sources_by_manifest(session, organisation, shown)
            published = await mirrors.readable(session, organisation, shown)
            evicted = await mirrors.restorable(session, organisation)
            nodes = await agents.holdings_of(session, shown)
        items = []
        for digest in shown:
            if digest in published or digest in nodes or digest in evicted:
                files, size = published.get(digest, (None, None))
                holdings = {f"{cluster}/{node}": one for (cluster, node), one in nodes.get(digest, {}).items()}
                items.append(
                    HeldManifest(
                        manifest=f"b3:{digest}",
                        sources=sources.get(digest, []),
                        files_total=files,
                        bytes_total=size,
                        mirror=digest in published,
                        restorable_until=self._until(evicted.get(digest)),
                        nodes=holdings,
                    )
                )
        cursor = f"b3:{shown[-1]}" if len(shown) < len(digests) else None
        return HeldManifests(items=items, next_cursor=cursor, store=None if after else await self._store_use())

    async def _store_use(self) -> StoreUse:
        async with self.database.read() as session:
            _, stored = await contents.totals(session)
        disk = await asyncio.to_thread(self.store.disk)
        return StoreUse(bytes_stored=stored, disk_free=disk and disk.free, disk_total=disk and disk.size)

    @staticmethod
    async def _page(session: ReadSession, digests: Sequence[str]) -> list[str]:
        """The first of these whose holders are not too many for one answer; at least one."""
        shown: list[str] = []
        left = _HOLDINGS
        for batch in batches(digests, _COUNTED):
            holders = await agents.count_holders(session, batch)
            for digest in batch:
                left -= holders.get(digest, 0)
                if shown and left < 0:
                    return shown
                shown.append(digest)
        return shown

    def _until(self, given_up_at: float | None) -> datetime | None:
        return None if given_up_at is None else moment(given_up_at + self.tombstone_seconds)

    async def find(self, of: str, organisation: str) -> Named:
        """What the name stands for. ``NotFoundError`` when it is nothing that was ever mirrored for this organisation."""
        async with self.database.read() as session:
            if "://" in of:
                manifests = await mirrors.manifests_of_source(session, organisation, of)
                kind: NamedKind = "source"
                places: list[Place] = []
            else:
                kind, places = await self._look_up(session, _digest(of), organisation)
                manifests = list(dict.fromkeys(place.manifest for place in places))
            sources = await mirrors.sources_by_manifest(session, organisation, manifests)
            known = [digest for digest in manifests if digest in sources]
            if not known:
                raise NotFoundError(of)
            own = [place for place in places if place.manifest in sources and kind != "manifest"]
            shown = await self._paths(session, own[:_SHOWN])
        return Named(
            of=of,
            kind=kind,
            manifests={f"b3:{digest}": sources[digest] for digest in known},
            places=shown,
        )

    @staticmethod
    async def _look_up(session: ReadSession, digest: str, organisation: str) -> tuple[NamedKind, list[Place]]:
        """From what is most to what is least, and from what costs least to look up to what costs most."""
        if await mirrors.sources_by_manifest(session, organisation, [digest]):
            return "manifest", [Place(digest, digest)]
        if found := await origins.places_of_content(session, organisation, digest):
            return "content", found
        if found := await origins.places_in_slab(session, organisation, digest):
            return "slab", found
        return "chunk", await origins.places_of_chunk(session, organisation, digest)

    @staticmethod
    async def _paths(session: ReadSession, places: Sequence[Place]) -> list[NamedPlace]:
        """One manifest after the other: each may have a million files, of which a hundred are told."""
        wanted: dict[str, set[str]] = {}
        for place in places:
            wanted.setdefault(place.manifest, set()).add(place.content)
        paths: dict[tuple[str, str], str] = {}
        for digest, named in wanted.items():
            found = await origins.paths(session, digest, named)
            paths |= {(digest, content): path for content, path in found.items()}
        return [
            NamedPlace(
                manifest=f"b3:{place.manifest}",
                content=f"b3:{place.content}",
                path=paths.get((place.manifest, place.content)),
                chunk_index=place.chunk_index,
            )
            for place in places
        ]


def _digest(text: str) -> str:
    try:
        return Digest.parse(text).hex
    except ValueError as error:
        raise InvalidRequestError(f"{error}; or name a source, such as hf://org/model") from error
