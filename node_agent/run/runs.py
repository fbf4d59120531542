"""Ranks of training jobs on this node: staged, started on command, followed, adopted after a restart, and cleaned up."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Final

from bdn.core.errors import BdnError, DiskFailedError, InvalidRequestError, NotFoundError
from bdn.core.training.states import OVER
from bdn.disk.durable import disk_errors, make_folder
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.wire.heartbeat_schema import Report
from bdn.wire.run_schema import NodeCapacity, RunCommand, RunReport
from node_agent.background_tasks import BackgroundTasks, happens_within
from node_agent.disk.trash import Trash
from node_agent.job.volumes import JobVolumes
from node_agent.mirror_link.heartbeats import ChangeSignal
from node_agent.run.capacity import capacity_of
from node_agent.run.directory import RunDirectory, RunRecord
from node_agent.run.launchers import answering_launcher
from node_agent.run.rank import NodeServices, Rank
from node_agent.settings import AgentSettings
from node_agent.stage.stages import StageService

logger = logging.getLogger(__name__)
_TELL_SECONDS: Final = 2.0  # between two progress reports
_ASK_SECONDS: Final = 10.0  # until a run that is over is looked up
_IDLE_TURNS: Final = 6  # of these, between two questions about a rank without a command; each has the job's secrets
_PRIVATE: Final = 0o700
_TRASH: Final = ".trash"


class GpusBusyError(InvalidRequestError):
    """Passes when an earlier rank has ended."""

    transient = True


class Runs:
    """The ranks of this node, by run and rank. One event loop."""

    def __init__(self, root: Path, services: NodeServices, background: BackgroundTasks, news: ChangeSignal) -> None:
        self._root = root
        self._services = services
        self._background = background
        self._news = news
        self._ranks: dict[tuple[str, int], Rank] = {}
        self._commanded = Counter[tuple[str, int]]()  # commands that are carried out

    @property
    def capacity(self) -> NodeCapacity:
        return self._services.capacity

    async def run(self, command: RunCommand, tell: Callable[[Report], None]) -> None:
        """Carry out a command of the mirror; returns once it is answered."""
        key = command.run, command.rank
        rank = self._ranks.get(key)
        if rank is None and command.want == "go":
            tell(Report(id=command.id, run=RunReport(run=command.run, rank=command.rank, state="LOST")))
            return
        # Also for a stop: an agent killed while it made the directory anew leaves volume and stage without one.
        rank = rank or self._begin(*key)
        self._commanded[key] += 1
        try:
            await self._carry_out(command, rank, tell)
        finally:
            self._commanded[key] -= 1
            if not self._commanded[key]:
                del self._commanded[key]

    async def _carry_out(self, command: RunCommand, rank: Rank, tell: Callable[[Report], None]) -> None:
        if command.want == "go":
            await rank.go()
        elif command.want == "stop":
            rank.stop()
        answers = OVER if command.want != "stage" else (*OVER, "STAGED", "RUNNING")
        told = None
        while True:
            changed, report = rank.changed, rank.report()
            if report != told:
                tell(Report(id=command.id, run=report))
                self._news.wake()
            if report.state in answers:
                return
            told = report
            await happens_within(_TELL_SECONDS, changed)

    def delivered(self, report: Report) -> None:
        """The mirror has recorded a final report: the directory of a run that is over is not needed any more."""
        if report.run is not None and report.run.state in OVER:
            rank = self._ranks.get((report.run.run, report.run.rank))
            if rank is not None and rank.state in OVER:
                self._background.start(self._remove(rank), f"remove run {rank.name}")

    async def resume(self) -> None:
        """Adopt the ranks of an earlier agent. Stages and job volumes must be resumed already."""
        for record in await in_thread(self._found):
            self._begin(record.run, record.rank).gpus = record.gpus
        self._background.start(self._look_up(), "runs that are over")

    def _found(self) -> list[RunRecord]:
        """The records of whole directories. Removes the others. Blocking."""
        with disk_errors(self._root):
            make_folder(self._root, _PRIVATE)
            paths = [path for path in sorted(self._root.iterdir()) if path.name != _TRASH]
        found = []
        for path in paths:
            record = RunDirectory(path).record()
            if record is None or path != self._directory(record.run, record.rank).path:
                self._services.trash.discard(path)
            else:
                found.append(record)
        return found

    def _directory(self, run: str, rank: int) -> RunDirectory:
        return RunDirectory(self._root / f"{run}-{rank}")

    def _begin(self, run: str, number: int) -> Rank:
        rank = Rank(
            run,
            number,
            self._directory(run, number),
            services=self._services,
            free_gpus=self._free_gpus,
            on_state=self._note_state,
        )
        self._ranks[run, number] = rank
        self._note_state()
        self._background.start(rank.live(), f"run {rank.name}")
        return rank

    def _note_state(self) -> None:
        """The ranks of a job start together, so ``go`` should not wait for the next heartbeat of an idle agent."""
        if any(rank.state == "STAGED" for rank in self._ranks.values()):
            self._news.awaits_command.set()
        else:
            self._news.awaits_command.clear()

    def _free_gpus(self, count: int) -> list[int]:
        """Indices of GPUs that no other rank has. Raises ``InvalidRequestError`` if the node has fewer, and ``GpusBusyError``."""
        taken = {gpu for rank in self._ranks.values() if rank.state not in OVER for gpu in rank.gpus}
        free = [gpu for gpu in range(self.capacity.gpus) if gpu not in taken]
        if len(free) < count:
            kind = GpusBusyError if count <= self.capacity.gpus else InvalidRequestError
            raise kind(f"the rank needs {count} GPUs, and {len(free)} of this node are free")
        return free[:count]

    async def _look_up(self) -> None:
        """Remove runs that are over, and stop others, if the mirror does not know them: it sends no command about them.

        A rank goes on while its agent is dead. If the mirror has given up the node meanwhile, the next agent adopts it
        and would never be told to stop it; the same after a partition of a rank that was STAGED.
        """
        for turn in count():
            await asyncio.sleep(_ASK_SECONDS)
            is_turn = turn % _IDLE_TURNS == 0
            idle = [one for key, one in self._ranks.items() if is_turn and not self._commanded[key]]
            for rank in {*idle, *(one for one in self._ranks.values() if one.state in OVER)}:
                try:
                    await self._services.run_spec(rank.run, rank.rank)
                except BdnError as error:
                    if error.code == NotFoundError.code:
                        rank.stop()
                        if rank.state in OVER:
                            await self._remove(rank)

    async def _remove(self, rank: Rank) -> None:
        if self._ranks.pop((rank.run, rank.rank), None) is None:
            return
        try:
            await in_thread(self._services.trash.discard, rank.directory.path)
        except DiskFailedError as error:
            logger.warning("cannot remove run %s; retrying at the next start of the agent: %s", rank.name, error)


async def open_runs(
    stack: AsyncExitStack,
    settings: AgentSettings,
    *,
    client: MirrorClient,
    volumes: JobVolumes,
    stages: StageService,
    news: ChangeSignal,
) -> Runs | None:
    """None without the role. Raises ``SettingsError``: no launcher works here."""
    if "job" not in settings.roles:
        return None
    launcher = await in_thread(answering_launcher, settings.job_launcher)
    root = (settings.data_dir / "runs").absolute()
    trash = await asyncio.to_thread(stack.enter_context, Trash(root / _TRASH))
    capacity = await in_thread(capacity_of, settings, launcher)
    services = NodeServices(client, volumes, stages, capacity, settings.node, trash)
    background = await stack.enter_async_context(BackgroundTasks())
    return Runs(root, services, background, news)
