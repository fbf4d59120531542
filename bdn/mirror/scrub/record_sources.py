"""Where the right record of a manifest or of a file may be had. What comes is believed when it has the name that was asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from bdn.core.chunk import chunk_count
from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.grant import Grant, GrantedMount
from bdn.core.manifest import Manifest
from bdn.core.store.layout import FileLayout
from bdn.mirror.agents.liveness import is_alive
from bdn.mirror.db import agents, origins, records
from bdn.mirror.db.database import Database
from bdn.mirror.db.origins import Origin
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.ingest.survey import manifest_of
from bdn.mirror.scrub.from_agents import holds
from bdn.mirror.scrub.from_upstream import UpstreamSource
from bdn.net.client.mirror_client import MirrorClient
from bdn.wire.grants import GrantSigner

_AGENTS: Final = 4  # asked for one record
_GRANT_SECONDS: Final = 300
_SECONDS: Final = 10.0


class RecordSource(Protocol):
    """Somebody who may know."""

    async def manifest(self, digest: Digest) -> bytes | None:
        """Its canonical bytes, which have this name."""
        ...

    async def content(self, digest: Digest) -> FileLayout | None:
        """What the file is made of."""
        ...


@dataclass(frozen=True)
class AgentRecords:
    """A ``RecordSource``: agents keep the manifests that they hold, with their layouts, and give them to who has a grant."""

    database: Database
    signer: GrantSigner
    clock: Callable[[], float] = time.time

    async def manifest(self, digest: Digest) -> bytes | None:
        """From the first agent that has it."""
        for address, grant in await self._holders(digest.hex):
            async with MirrorClient(address, timeout_seconds=_SECONDS) as agent:
                with suppress(BdnError):
                    return (await agent.manifest(digest, grant)).canonical
        return None

    async def content(self, digest: Digest) -> FileLayout | None:
        """Out of a layout that names it."""
        async with self.database.read() as session:
            names = await records.naming(session, digest)
        for name in names:
            for address, grant in await self._holders(name):
                async with MirrorClient(address, timeout_seconds=_SECONDS) as agent:
                    with suppress(BdnError):
                        layout = await agent.layout(Digest(name), grant)
                        if digest in layout.files:
                            return layout.files[digest]
        return None

    async def _holders(self, manifest: str) -> list[tuple[str, str]]:
        """Addresses, each with a grant."""
        async with self.database.read() as session:
            mirrored = await origins.mirrored_as(session, manifest)
            rows = await agents.all_agents(session)
        if not mirrored:
            return []
        mount = GrantedMount("/repair", Digest(manifest), mirrored[0].row.source)
        grant = self.signer.sign(Grant(mirrored[0].organisation, (mount,), self.clock() + _GRANT_SECONDS))
        living = [row for row in rows if row.advertise and is_alive(row, self.clock()) and holds(row, manifest)]
        return [(str(row.advertise), grant) for row in living[:_AGENTS]]


@dataclass(frozen=True)
class UpstreamRecords:
    """A ``RecordSource``: the tree is listed again for a manifest; of a file those chunks are read that no sound name is left of."""

    database: Database
    upstream: UpstreamSource
    copier: Copier

    async def manifest(self, digest: Digest) -> bytes | None:
        """By metadata alone: every file of it is known by its identity."""
        async with self.database.read() as session:
            found = await origins.mirrored_as(session, digest.hex)
        for origin in found:
            with suppress(BdnError):
                manifest = await self._listed(origin)
                if manifest is not None and manifest.digest == digest:
                    return manifest.canonical
        return None

    async def _listed(self, origin: Origin) -> Manifest | None:
        async with self.upstream.opened(origin) as (wanted, source):
            survey = await self.upstream.surveyor.survey(wanted, source)
        return None if survey.diff.missing else await asyncio.to_thread(manifest_of, survey, {})

    async def content(self, digest: Digest) -> FileLayout | None:
        """The copier reads what is not there, and says what the file is made of."""
        async with self.database.read() as session:
            found = await origins.origins(session, digest.hex)
            named = await records.chunks_named(session, digest)
        store = self.copier.store
        kept = await asyncio.to_thread(lambda: {index: chunk for index, chunk in named.items() if store.keep(chunk)})
        for origin in found:
            for half in (kept, {}):
                with suppress(BdnError):
                    layout = await self._copied(origin, digest, half)
                    if layout is not None and layout.digest == digest:
                        return layout
        return None

    async def _copied(self, origin: Origin, digest: Digest, half: Mapping[int, Digest]) -> FileLayout | None:
        async with self.upstream.files(origin, await self.upstream.paths(origin, {digest})) as files:
            for located in files.values():
                count = chunk_count(located.file.size)
                within = {index: chunk for index, chunk in half.items() if index < count}
                return await self.copier.copy(located, within, lambda *_: None)
        return None
