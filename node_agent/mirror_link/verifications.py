"""Verifications on request: what the mirror commands, and what somebody on this machine asks about a path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, InternalError, InvalidRequestError
from bdn.wire.errors import body_of
from bdn.wire.operation_schema import PathVerificationRequest, VerifyCommand, VerifyReport
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.scrub.findings import Findings, ScrubTarget
from node_agent.scrub.scrubber import Scrubber
from node_agent.scrub.staged_files import StagedFiles

logger = logging.getLogger(__name__)
_REMEMBERED: Final = 1000


@dataclass
class Verifications:
    """The mirror repeats a command until it has the report. ``wake`` is called when there is one. One event loop."""

    background: BackgroundTasks
    scrubber: Scrubber
    staged: StagedFiles
    wake: Callable[[], object]
    _seen: dict[str, None] = field(default_factory=dict)
    _reports: dict[str, VerifyReport] = field(default_factory=dict)

    # --- for the mirror ---

    def take(self, command: VerifyCommand) -> None:
        """Begin, unless it was begun."""
        if command.id in self._seen:
            return
        self._seen[command.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self.background.start(self._work(command), f"verification {command.id}")

    def reports(self) -> list[VerifyReport]:
        """Of those that have ended; told until ``delivered``."""
        return list(self._reports.values())

    def delivered(self, reports: Sequence[VerifyReport]) -> None:
        """The mirror has these."""
        for report in reports:
            self._reports.pop(report.id, None)

    async def _work(self, command: VerifyCommand) -> None:
        self._reports[command.id] = await self.carry_out(command)
        self.wake()

    async def carry_out(self, command: VerifyCommand) -> VerifyReport:
        """The report; errors are in it, because somebody waits for it elsewhere."""
        findings = Findings(command.repair)
        try:
            with self.scrubber.source.grants.using(command.grants):
                await self._verify(command, findings)
        except BdnError as error:
            return findings.report(command.id, body_of(error))
        except Exception as error:
            logger.exception("verification %s failed", command.id)
            return findings.report(command.id, body_of(InternalError(f"{type(error).__name__}: {error}")))
        return findings.report(command.id)

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

    # --- for people ---

    async def look_at(self, request: PathVerificationRequest) -> VerifyReport:
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
        return findings.report(request.path)


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
