"""Checkpoints as a source: what jobs pushed is listed from its manifest's pages, and no byte of it has to come."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from bdn.core.chunk import Digest, FileLayout
from bdn.core.errors import SourceNotFoundError
from bdn.core.manifest import PlacedFile, files_of
from bdn.core.source.upstream import Location, Resolution, UpstreamFile
from bdn.core.source.uri import CheckpointUri
from bdn.core.store import ChunkStore
from bdn.mirror.db import checkpoints, manifests
from bdn.mirror.db.checkpoints import PushScope
from bdn.mirror.db.database import Database

_LISTED_AT_ONCE: Final = 1000  # files of one trip to a thread


@dataclass
class CheckpointSource:
    """A ``Source``. The checkpoint may be replaced or deleted meanwhile; what was resolved is listed as long as it is held."""

    database: Database
    store: ChunkStore
    uri: CheckpointUri
    organisation: str
    team: str | None = None  # whose project it is; None: whichever the name means to the organisation
    _found: tuple[Digest, PushScope] | None = None

    async def resolve(self) -> Resolution:
        """The job and the name of what the source means now: ``job/name``."""
        await self._find()
        return Resolution(f"{self.uri.job}/{self.uri.checkpoint}")

    async def _find(self) -> tuple[Digest, PushScope]:
        async with self.database.read() as session:
            found = await checkpoints.found(session, self.organisation, self.uri, self.team)
        self.uri = replace(self.uri, job=found.row.job, checkpoint=found.row.name)
        self._found = Digest(found.row.manifest), PushScope(self.organisation, found.project.team)
        return self._found

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:  # noqa: ARG002
        """Every file of it, found by what its team pushed."""
        name, scope = self._found or await self._find()
        async with self.database.read() as session:
            if await manifests.get(session, name.hex) is None:
                raise SourceNotFoundError(str(self.uri), "it was deleted or replaced just now")
        files = self._files(name)
        while some := await asyncio.to_thread(lambda: list(islice(files, _LISTED_AT_ONCE))):
            for file in some:
                yield UpstreamFile(file.path, file.size, scope.identity(file.digest), str(file.digest), str(name))

    async def placed(self, keys: AbstractSet[str]) -> Mapping[str, FileLayout]:
        """Where files with these identities lie, by the keys of these."""
        name, scope = self._found or await self._find()
        return await asyncio.to_thread(self._placed, name, scope, keys)

    def _placed(self, name: Digest, scope: PushScope, keys: AbstractSet[str]) -> dict[str, FileLayout]:
        found = ((scope.identity(file.digest).key, file.layout) for file in self._files(name))
        return {key: layout for key, layout in found if key in keys}

    def _files(self, name: Digest) -> Iterator[PlacedFile]:
        root = manifests.root_of(self.store, name, self.organisation)
        return files_of(manifests.page(self.store, page, self.organisation) for page in root.pages)

    async def locate(self, file: UpstreamFile) -> Location:
        """Nowhere: what the store lost of a checkpoint, nobody has. ``SourceNotFoundError``."""
        raise SourceNotFoundError(str(self.uri), f"the store has lost some of {file.path!r}, and nobody else has it")


def pinned(uri: CheckpointUri, revision: str) -> CheckpointUri:
    """The source that was resolved to this before."""
    job, _, name = revision.partition("/")
    return replace(uri, job=job, checkpoint=name)
