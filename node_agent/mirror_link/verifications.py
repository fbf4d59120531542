"""Verifications on request: what the mirror commands, and what somebody on this machine asks about a path."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError
from bdn.wire.operation_schema import PathVerification, PathVerificationRequest, Report, VerifyCommand
from node_agent.background_tasks import in_thread
from node_agent.scrub.findings import Findings, ScrubTarget
from node_agent.scrub.repair import StagedFiles
from node_agent.scrub.scrubber import Scrubber


@dataclass(frozen=True)
class VerificationCommands:
    """Reads what is held again, for the mirror or for somebody on this machine."""

    scrubber: Scrubber
    staged: StagedFiles

    async def run(self, command: VerifyCommand, tell: Callable[[Report], None]) -> None:
        """Read all that is named; what was read until an error is told, too."""
        findings = Findings(command.repair)
        try:
            with self.scrubber.source.grants.using(command.grants):
                await self._verify(command, findings)
        finally:
            verified, error = findings.report()
            tell(Report(id=command.id, verify=verified, error=error))

    async def _verify(self, command: VerifyCommand, findings: Findings) -> None:
        index, tier = self.scrubber.cache.index, self.scrubber.tier
        wanted = _named(command)
        if command.tier in (None, "node"):
            contents = {
                content: manifest
                for manifest in index.manifests()
                if wanted is None or manifest in wanted
                for content in index.contents_of(manifest)
            }
            for content, manifest in contents.items():
                await self.scrubber.file(manifest, content, findings)
        if command.tier in (None, "cluster"):
            chunks = {
                chunk: manifest
                for manifest in await in_thread(tier.manifests)
                if wanted is None or manifest in wanted
                for chunk in await in_thread(tier.chunks_of, manifest)
            }
            for chunk, manifest in chunks.items():
                await self.scrubber.chunk(manifest, chunk, findings)

    async def look_at(self, request: PathVerificationRequest) -> PathVerification:
        """Staged files, and the files of the cache that they come from.

        Raises:
            NotFoundError: there are none at this path.
        """
        findings = Findings(request.repair)
        for file in await in_thread(self.staged.find, request.path):
            await self.scrubber.file(file.manifest, file.entry.digest, findings)
            if not await in_thread(_is_same, file.path, self.scrubber.repair.places.file(file.entry.digest)):
                target = ScrubTarget(file.path, file.entry.digest, file.manifest, shown=file.shown)
                await self.scrubber.copy(target, file.entry.size, findings)
        verified, error = findings.report()
        return PathVerification(id=request.path, error=error, **verified.model_dump())


def _named(command: VerifyCommand) -> frozenset[Digest] | None:
    """The manifests that are meant; None means all."""
    if command.all == (command.manifests is not None):
        raise InvalidRequestError("select by exactly one of manifests and all")
    try:
        return None if command.manifests is None else frozenset(map(Digest.parse, command.manifests))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def _is_same(one: Path, other: Path) -> bool:
    """Whether two names are one file."""
    try:
        return one.samefile(other)
    except OSError:  # it is gone, or a link to itself, which reading it says
        return False
