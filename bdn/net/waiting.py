"""Waits for mirrors and stages, and reports their progress."""

from collections.abc import AsyncIterator, Callable

from bdn.core.errors import BdnError, CanceledError, InvalidRequestError
from bdn.net.client import OUTAGE_SECONDS, OutageRetry
from bdn.wire.mirror_schema import Mirror
from bdn.wire.progress import Report, progress_of_mirror, progress_of_stage
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageDocument


def outage_retry(what: str, say: Callable[[str], object], warn: Callable[[str], object]) -> OutageRetry:
    """Retries requests for ``what``, such as a mirror's id; an outage calls ``warn`` once, and its end ``say``."""

    def told(error: BdnError | None) -> None:
        if error is None:
            say(f"{what}: the service answers again")
        else:
            warn(f"{error}. {what} may continue meanwhile; retrying for {OUTAGE_SECONDS / 60:.0f} minutes")

    return OutageRetry(told=told)


async def last_mirror(updates: AsyncIterator[Mirror], report: Report | None) -> Mirror:
    async for mirror in updates:
        if report is not None:
            report(progress_of_mirror(mirror))
    return mirror


async def last_stage(updates: AsyncIterator[StageDocument], report: Report | None) -> StageDocument:
    async for stage in updates:
        if report is not None:
            report(progress_of_stage(stage))
    return stage


def ready_mirror(mirror: Mirror) -> Mirror:
    """The finished mirror. Raises the error with which it failed."""
    if mirror.status != "READY":
        raise ReportedError(mirror.error) if mirror.error else CanceledError(f"mirror {mirror.id}")
    return mirror


def ready_stage(stage: StageDocument) -> StageDocument:
    """The finished stage. Raises the error with which it failed."""
    if stage.state != "READY":
        raise ReportedError(stage.error) if stage.error else CanceledError("staging")
    return stage


def grant_of(mirror: Mirror) -> str:
    """The grant of a READY mirror. Raises ``InvalidRequestError`` with the mirror's status."""
    if mirror.grant is not None:
        return mirror.grant
    if mirror.status == "READY":
        raise InvalidRequestError(f"mirror {mirror.id} was evicted meanwhile; mirror its sources again")
    problem = mirror.error.message if mirror.error else "it is still running: use 'bdn mirror --wait'"
    raise InvalidRequestError(f"mirror {mirror.id} is {mirror.status}: {problem}")
