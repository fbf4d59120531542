"""Which tiers hold a manifest, and what a digest or a source names, for an organisation."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError, StoreUnavailableError
from bdn.core.manifest import PageEntry, read_page
from bdn.core.store import MirrorStore
from bdn.mirror.db import agents, chunks, identities, manifests, mirrors, origins
from bdn.mirror.db.database import Database, ReadSession, batches
from bdn.transfer.fair_limit import FairLimit
from bdn.wire.event_schema import Named, NamedKind, NamedPlace
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, StoreUse
from bdn.wire.shapes import moment

_SHOWN: Final = 100  # files whose paths are listed
_SEARCHED: Final = 100  # manifests that are searched for a digest
_PAGES: Final = 64  # of about 4 MiB, read by one search
_HOLDINGS: Final = 1000  # holders on one page: a thousand agents may hold each manifest
_COUNTED: Final = 50  # manifests whose holders are counted at once


@dataclass(frozen=True)
class Names:
    """The service behind ``GET /manifests`` and ``GET /names``."""

    database: Database
    store: MirrorStore
    tombstone_seconds: float
    _turns: FairLimit = field(default_factory=lambda: FairLimit(1))  # searches

    async def held(self, organisation: str, after: str, limit: int, holder: agents.Name | None = None) -> HeldManifests:
        """A page of the organisation's manifests after ``after`` that some tier holds, or that one agent holds.

        Of a ``holder`` the page names no other agents.
        """
        async with self.database.read() as session:
            digests = await mirrors.mirrored_after(session, organisation, after, limit + 1, holder)
            shown = digests[:limit] if holder else await self._page(session, digests[:limit])
        items = await self._held(shown, organisation, holder)
        cursor = f"b3:{shown[-1]}" if len(shown) < len(digests) else None
        return HeldManifests(
            items=items, next_cursor=cursor, store=None if after or holder else await self._store_use()
        )

    async def held_of(self, organisation: str, wanted: Collection[str]) -> dict[str, HeldManifest]:
        """The manifests among these, ``b3:…``, that were mirrored for the organisation and that some tier holds."""
        digests = sorted({name.removeprefix("b3:") for name in wanted})
        async with self.database.read() as session:
            own = await mirrors.sources_by_manifest(session, organisation, digests)
        found = await self._held([digest for digest in digests if digest in own], organisation)
        return {one.manifest: one for one in found}

    async def _held(
        self, digests: Sequence[str], organisation: str, holder: agents.Name | None = None
    ) -> list[HeldManifest]:
        async with self.database.read() as session:
            sources = await mirrors.sources_by_manifest(session, organisation, digests)
            published = await mirrors.readable(session, organisation, digests)
            evicted = await mirrors.restorable(session, organisation)
            nodes = await agents.holdings_of(session, digests, holder)
        items = []
        for digest in digests:
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
        return items

    async def _store_use(self) -> StoreUse:
        async with self.database.read() as session:
            _, stored = await chunks.of(session, chunks.totals)
        disk = await asyncio.to_thread(self.store.disk)
        return StoreUse(bytes_stored=stored, disk_free=disk and disk.free, disk_total=disk and disk.size)

    @staticmethod
    async def _page(session: ReadSession, digests: Sequence[str]) -> list[str]:
        """The first of these whose holders fit into one answer; at least one."""
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
        """What the name refers to. ``NotFoundError`` if it was never mirrored for this organisation.

        A small file is not found by its digest: its bytes are in a slab, and only the page of its manifest lists the
        digest.
        """
        if "://" in of:
            async with self.database.read() as session:
                named = await mirrors.manifests_of_source(session, organisation, of)
                return Named(of=of, kind="source", manifests=await self._sources(session, organisation, named))
        digest = _digest(of)
        async with self.database.read() as session:
            if found := await self._sources(session, organisation, [digest.hex]):
                return Named(of=of, kind="manifest", manifests=found)
            known = await identities.of_content(session, digest)
            first = next(iter(known.chunks.values()), digest) if known else digest
            found, of_first = [
                await self._sources(
                    session, organisation, await origins.manifests_with(session, organisation, chunk, _SEARCHED)
                )
                for chunk in (digest, first)
            ]
        async with self._turns.place(organisation):
            kind, places = await asyncio.to_thread(self._places, organisation, digest, [*(found or of_first)])
        shown = {place.manifest for place in places}
        if not found:  # other files may begin with the same chunk
            found = {name: sources for name, sources in of_first.items() if name in shown}
        if not found:
            raise NotFoundError(of)
        return Named(of=of, kind=kind, manifests=found, places=places)

    @staticmethod
    async def _sources(session: ReadSession, organisation: str, manifests: Sequence[str]) -> dict[str, list[str]]:
        sources = await mirrors.sources_by_manifest(session, organisation, manifests)
        return {f"b3:{digest}": sources[digest] for digest in manifests if digest in sources}

    def _places(self, organisation: str, wanted: Digest, names: Sequence[str]) -> tuple[NamedKind, list[NamedPlace]]:
        """Where pages of these manifests name the digest; at most ``_PAGES`` pages are searched. Blocking."""
        kind: NamedKind = "chunk"
        places: list[NamedPlace] = []
        pages_left = _PAGES
        for name in names:
            with suppress(StoreUnavailableError):  # a damaged manifest is named without its files
                root = manifests.root_of(self.store, Digest.parse(name), organisation)
                if any(page.digest == wanted for page in root.pages):
                    return "page", []
                for page in root.pages[:pages_left]:
                    pages_left -= 1
                    content = manifests.page(self.store, page, organisation)
                    if wanted.hex.encode() in content:
                        kind, found = _in_page(wanted, name, content)
                        places += found[: _SHOWN - len(places)]
                        break
        return kind, places


def _in_page(wanted: Digest, manifest: str, content: bytes) -> tuple[NamedKind, list[NamedPlace]]:
    def place(entry: PageEntry, chunk_index: int | None = None) -> NamedPlace:
        return NamedPlace(manifest=manifest, content=str(entry.digest), path=entry.path, chunk_index=chunk_index)

    entries = read_page(content)
    if found := [place(entry) for entry in entries if entry.digest == wanted]:
        return "content", found
    if found := [place(entry) for entry in entries if entry.slice is not None and entry.slice.slab == wanted]:
        return "slab", found
    return "chunk", [
        place(entry, entry.start + index)
        for entry in entries
        for index, chunk in enumerate(entry.chunks)
        if chunk == wanted
    ]


def _digest(text: str) -> Digest:
    try:
        return Digest.parse(text)
    except ValueError as error:
        raise InvalidRequestError(f"{error}; or name a source, such as hf://org/model") from error
