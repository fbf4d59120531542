"""What the page reads and changes: the services behind the routes of the API, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bdn.mirror.access.sessions import Sessions
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db.agents import Name
from bdn.mirror.db.events import Events
from bdn.mirror.db.waiting import SharedRead, Watch
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.operations.heartbeats import Membership
from bdn.mirror.operations.job_stages import JobStages
from bdn.mirror.operations.names import Names
from bdn.mirror.operations.requests import OperationRequests
from bdn.mirror.training.jobs import TrainingJobs
from bdn.wire.heartbeat_schema import AgentDocument

_PAGE: int = 1000  # agents in one statement
FRESH_SECONDS = 1.0  # no view is read more often


@dataclass(frozen=True)
class Sources:
    sessions: Sessions
    requests: MirrorRequests
    membership: Membership
    names: Names
    events: Events
    damages: Damages
    operations: OperationRequests
    job_stages: JobStages
    training_jobs: TrainingJobs
    projects: Projects
    watch: Watch
    now: Callable[[], float]

    @cached_property
    def agents(self) -> SharedRead[Sequence[AgentDocument]]:
        """All agents in the order of their names. For callers of all teams, as ``GET /agents``."""
        return SharedRead(self._read_agents, FRESH_SECONDS)

    async def _read_agents(self) -> Sequence[AgentDocument]:
        found: list[AgentDocument] = []
        after: Name | None = None
        while True:
            items, after = await self.membership.agents(after, _PAGE)
            found += items
            if after is None:
                return found
