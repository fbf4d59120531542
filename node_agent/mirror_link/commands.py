"""What the mirror asks of this agent: accepted once by its id, run in the background, reported until that is delivered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from bdn.core.errors import BdnError, InternalError, InvalidRequestError
from bdn.wire.agent_schema import Command, Report
from bdn.wire.errors import ErrorBody, body_of
from node_agent.background_tasks import BackgroundTasks
from node_agent.mirror_link.evictions import EvictionCommands
from node_agent.mirror_link.prefetches import PrefetchCommands
from node_agent.mirror_link.verifications import VerificationCommands

logger = logging.getLogger(__name__)
_REMEMBERED: Final = 1000  # commands: an answer of the mirror's that was long on its way may repeat one


class CommandInbox:
    """Nothing is kept on disk: the mirror repeats to an agent that restarts what it has not reported.

    ``wake`` is called when there is something to report. One event loop.
    """

    def __init__(
        self,
        background: BackgroundTasks,
        evictions: EvictionCommands,
        prefetches: PrefetchCommands,
        verifications: VerificationCommands,
        wake: Callable[[], None],
    ) -> None:
        self._background = background
        self._evictions = evictions
        self._prefetches = prefetches
        self._verifications = verifications
        self._wake = wake
        self._seen: dict[str, None] = {}
        self._reports: dict[str, Report] = {}

    def accept(self, command: Command) -> None:
        """Begin, unless it was begun."""
        if command.id in self._seen:
            return
        self._seen[command.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.pop(next(iter(self._seen)))
        self._reports[command.id] = Report(id=command.id, running=True)
        self._background.start(self._run(command), f"command {command.id}")

    def reports(self) -> list[Report]:
        """How far each is; one that is over is told until ``delivered``."""
        return list(self._reports.values())

    def delivered(self, reports: Sequence[Report]) -> None:
        """The mirror has these."""
        for report in reports:
            if not report.running:
                self._reports.pop(report.id, None)

    async def _run(self, command: Command) -> None:
        """Errors are reported, because somebody waits for them elsewhere."""
        try:
            await self._carry_out(command)
        except BdnError as error:
            self._end(command, body_of(error))
        except Exception as error:
            logger.exception("command %s failed", command.id)
            self._end(command, body_of(InternalError(f"{type(error).__name__}: {error}")))
        else:
            self._end(command, None)

    async def _carry_out(self, command: Command) -> None:
        if command.evict is not None:
            await self._evictions.run(command.evict, self._tell)
        elif command.prefetch is not None:
            await self._prefetches.run(command.prefetch, self._tell)
        elif command.verify is not None:
            await self._verifications.run(command.verify, self._tell)
        else:
            raise InvalidRequestError("this version of the agent does not know the command; use the mirror's version")

    def _tell(self, report: Report) -> None:
        """How far a command is."""
        self._reports[report.id] = report.model_copy(update={"running": True})

    def _end(self, command: Command, error: ErrorBody | None) -> None:
        report = self._reports[command.id]
        self._reports[command.id] = report.model_copy(update={"running": False, "error": error or report.error})
        self._wake()
