"""Checkpoints as a source: listed from the pages of their manifests, without moving a byte."""

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

_LISTED_AT_ONCE: Final = 1000  # files per call in a thread


@dataclass
class CheckpointSource:
    """A ``Source``. The checkpoint may be replaced or deleted meanwhile; the resolved one is listed while it is held."""

    database: Database
    store: ChunkStore
    uri: CheckpointUri
    organisation: str
    team: str | None = None  # of the project; None: any of the organisation's
    _found: tuple[Digest, PushScope] | None = None

    async def resolve(self) -> Resolution:
        """Returns ``job/name`` of the checkpoint that the source names now."""
        await self._find()
        return Resolution(f"{self.uri.job}/{self.uri.checkpoint}")

    async def _find(self) -> tuple[Digest, PushScope]:
        async with self.database.read() as session:
            found = await checkpoints.found(session, self.organisation, self.uri, self.team)
        self.uri = replace(self.uri, job=found.row.job, checkpoint=found.row.name)
        self._found = Digest(found.row.manifest), PushScope(self.organisation, found.project.team)
        return self._found

    async def list(self, resolution: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:  # noqa: ARG002
        """All files, with the identities under which the team pushed them."""
        name, scope = self._found or await self._find()
        async with self.database.read() as session:
            if await manifests.get(session, name.hex) is None:
                raise SourceNotFoundError(str(self.uri), "it was deleted or replaced just now")
        files = self._files(name)
        while some := await asyncio.to_thread(lambda: list(islice(files, _LISTED_AT_ONCE))):
            for file in some:
                yield UpstreamFile(file.path, file.size, scope.identity(file.digest), str(file.digest), str(name))

    async def placed(self, keys: AbstractSet[str]) -> Mapping[str, FileLayout]:
        """The layouts of files with these identities, by identity key."""
        name, scope = self._found or await self._find()
        return await asyncio.to_thread(self._placed, name, scope, keys)

    def _placed(self, name: Digest, scope: PushScope, keys: AbstractSet[str]) -> dict[str, FileLayout]:
        found = ((scope.identity(file.digest).key, file.layout) for file in self._files(name))
        return {key: layout for key, layout in found if key in keys}

    def _files(self, name: Digest) -> Iterator[PlacedFile]:
        root = manifests.root_of(self.store, name, self.organisation)
        return files_of(manifests.page(self.store, page, self.organisation) for page in root.pages)

    async def locate(self, file: UpstreamFile) -> Location:
        """Raises ``SourceNotFoundError``: a checkpoint's bytes exist only in the store."""
        raise SourceNotFoundError(
            str(self.uri),
            f"the store has lost chunks of {file.path!r}, and a checkpoint has no other copy; push it again",
        )


def pinned(uri: CheckpointUri, revision: str) -> CheckpointUri:
    """The source as resolved to this revision before."""
    job, _, name = revision.partition("/")
    return replace(uri, job=job, checkpoint=name)
