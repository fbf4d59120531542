"""Checkpoints as a source: what jobs pushed is listed from the manifest, and no byte of it has to come."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import SourceNotFoundError
from bdn.core.source.upstream import Location, Resolution, UpstreamFile
from bdn.core.source.uri import CheckpointUri
from bdn.mirror.db import checkpoints, contents
from bdn.mirror.db.checkpoints import PushScope
from bdn.mirror.db.database import Database


@dataclass
class CheckpointSource:
    """A ``Source``. The checkpoint may be replaced or deleted meanwhile; what was resolved is listed as long as it is held."""

    database: Database
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
            row = await contents.manifest(session, name.hex)
        if row is None:
            raise SourceNotFoundError(str(self.uri), "it was deleted or replaced just now")
        for file in Manifest.parse(row.canonical).files:
            yield UpstreamFile(file.path, file.size, scope.identity(file.digest), str(file.digest), str(name))

    async def locate(self, file: UpstreamFile) -> Location:
        """Nowhere: what the store lost of a checkpoint, nobody has. ``SourceNotFoundError``."""
        raise SourceNotFoundError(str(self.uri), f"the store has lost some of {file.path!r}, and nobody else has it")


def pinned(uri: CheckpointUri, revision: str) -> CheckpointUri:
    """The source that was resolved to this before."""
    job, _, name = revision.partition("/")
    return replace(uri, job=job, checkpoint=name)
