"""Prolog and epilog of a Slurm job on one node: stage the sources of its comment, and release them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.client.services import Services
from bdn.client.staged import StagedFiles
from bdn.core.errors import BdnError
from bdn.core.printable import printable
from bdn.core.units import format_duration
from bdn.net.client import OutageRetry
from bdn.net.waiting import ready_mirror
from bdn.slurm.comment import Requested, requested
from bdn.slurm.job_folder import JobFolders, SlurmJob
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody
from bdn.wire.named_sources import request_body

logger = logging.getLogger(__name__)
_RELEASE_SECONDS: Final = 60.0
_CANCELED_SECONDS: Final = 10.0  # between two requests to slurmctld, while a prolog waits
_MOST_LISTED: Final = 1000  # more nodes than these do not have a mirror of their own for one job


@dataclass
class Outages:
    """Retries requests, and knows what they wait for."""

    trouble: str = ""

    def retry(self, _: str) -> OutageRetry:
        return OutageRetry(told=self._told)

    def _told(self, error: BdnError | None) -> None:
        self.trouble = "" if error is None else f": {error}"


@dataclass(frozen=True, slots=True)
class HookOutcome:
    """``lines`` of the job's environment, or a problem, for people."""

    lines: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Hooks:
    """``is_over`` says whether slurmctld has ended a job whose prolog still runs; ``secrets`` may be named by comments."""

    services: Services
    folders: JobFolders
    is_over: Callable[[int], Awaitable[bool]]
    outages: Outages = field(default_factory=Outages)
    secrets: AbstractSet[str] = frozenset()

    async def prolog(self, job: SlurmJob, seconds: float) -> int:
        """Stage, within so many seconds. Returns the exit code: 1 if this node cannot stage, so Slurm drains it.

        What is wrong with the job, or with services outside this node, is left for the job's tasks to report.

        Raises ``OSError``: this node's folder of jobs is not writable.
        """
        self.folders.make(job)
        try:
            wanted = requested(job.comment, self.secrets)
        except BdnError as error:
            self._refuse(job, f"{error} [{error.code}]")
            return 0
        outcome = await self._within(seconds, job, wanted)
        if outcome.problem is None:
            self.folders.leave(job, "environment", outcome.lines)
            return 0
        await self._release(lambda stages: stages == job.stages)
        if not await self.services.agent.ready():
            logger.error("job %s: the agent of this node does not work, draining the node: %s", job.id, outcome.problem)
            return 1
        self._refuse(job, outcome.problem)
        return 0

    async def epilog(self, job: SlurmJob) -> None:
        """Release what the job staged. If the agent does not answer, the next prolog or epilog releases it."""
        self.folders.remove(job)
        await self._sweep()

    async def _within(self, seconds: float, job: SlurmJob, wanted: Requested) -> HookOutcome:
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._outcome(job, wanted))
            end = group.create_task(self._until_over(job))
            done, _ = await asyncio.wait((work, end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            end.cancel()
        if work in done:
            return work.result()
        if end in done:
            return HookOutcome(problem="the job ended before its files were staged")
        return HookOutcome(
            problem=f"the files were not staged within {format_duration(seconds)}{self.outages.trouble}. The mirror "
            "continues to copy them: submit the job again, after 'bdn mirror SOURCE --wait'"
        )

    async def _outcome(self, job: SlurmJob, wanted: Requested) -> HookOutcome:
        try:
            await self.outages.retry("agent").ask(self.services.agent.stages)
            await self._sweep()
            return HookOutcome(lines=await self._staged(job, wanted))
        except BdnError as error:
            return HookOutcome(problem=f"{error} [{error.code}]")
        except Exception:
            logger.exception("job %s: staging failed because of a bug", job.id)
            return HookOutcome(problem="staging failed because of a bug; the node's syslog has more [INTERNAL]")

    async def _staged(self, job: SlurmJob, wanted: Requested) -> tuple[str, ...]:
        """``NAME=path`` for each source, once all files are verified and mounted."""
        mounts = {f"/job-{job.id}.{job.restarts}/{one.name}": one.name for one in wanted.sources}
        body = request_body(tuple(one.source for one in wanted.sources), tuple(mounts), secret=wanted.secret)
        begun = await self._agreed(job, body, list(mounts))
        mirror = ready_mirror(await self.services.last_mirror(begun.id, None))
        stage = await self.services.begin_stage(mirror.id, job.stages, ttl_seconds=None, warm=False, report=None)
        paths = StagedFiles.of(await self.services.last_stage(stage.id, None)).paths
        return tuple(f"{name}={paths[mount]}" for mount, name in mounts.items())

    async def _agreed(self, job: SlurmJob, body: MirrorRequestBody, mounts: list[str]) -> Mirror:
        """The mirror of this job for all of its nodes, so that they see one commit of a branch.

        Mount locations name the job, so an equal mirror is of another node of it. A requests a mirror, which is READY
        at once; the branch moves; B requests another one, finds A's, which is older, and takes that.
        """
        own = await self.outages.retry("mirror").ask(partial(self.services.mirrors.request, body))
        if job.nodes == 1:
            return own
        listed = partial(self.services.mirrors.mirrors, source=own.sources[0].source, limit=_MOST_LISTED)
        equal = [
            mirror
            for mirror in await self.outages.retry("mirror").ask(listed)
            if [one.mount_location for one in mirror.sources] == mounts and mirror.status not in ("FAILED", "CANCELED")
        ]
        return min((own, *equal), key=lambda mirror: (mirror.created_at, mirror.id))

    async def _until_over(self, job: SlurmJob) -> None:
        while True:
            await asyncio.sleep(_CANCELED_SECONDS)
            if await self.is_over(job.id):
                return

    async def _sweep(self) -> None:
        await self._release(lambda stages: not self.folders.has(stages))

    async def _release(self, is_over: Callable[[str], bool]) -> None:
        """Failures are logged; the next prolog or epilog of this node tries again."""
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                for stage in (await self.services.agent.stages()).items:
                    if is_over(stage.job_id) and stage.state not in ("RELEASED", "FAILED"):
                        await self._unstage(stage.id)
        except BdnError as error:
            logger.warning("cannot release the stages of ended jobs now: %s", error)
        except TimeoutError:
            logger.warning(
                "cannot release the stages of ended jobs now: the agent takes longer than %d s", _RELEASE_SECONDS
            )

    async def _unstage(self, stage_id: str) -> None:
        try:
            await self.services.agent.unstage(stage_id)
        except BdnError as error:
            logger.warning("cannot release stage %s now: %s", stage_id, error)

    def _refuse(self, job: SlurmJob, problem: str) -> None:
        logger.warning("job %s gets no files: %s", job.id, problem)
        self.folders.leave(job, "error", [f"bdn: {printable(problem)}"])


async def is_over(job_id: int) -> bool:
    """Ask slurmctld. False if it does not answer, or if there is no ``squeue``.

    The id of the first task of an array is also the id of the array, of which ``squeue`` shows all tasks.
    """
    with suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            *("squeue", "--noheader", "--format=%A %T", f"--job={job_id}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            shown, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return f"{job_id} COMPLETING" in shown.decode(errors="replace").splitlines()
    return False
