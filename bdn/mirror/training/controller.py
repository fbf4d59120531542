"""The controller: prepares jobs, places them, and takes the steps that only time makes due. Any number may run.

What takes several transactions (``_prepare``) is claimed for 15 s, and another controller resumes it when the claim
expires. All else is one transaction on locked rows, which reads what it decides on.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from bdn.core.errors import BdnError, CacheAffinityError, InternalError, SecretNotFoundError, StoreUnavailableError
from bdn.core.source.uri import WeightsSource, parse_source
from bdn.core.training.placement import Demand, Node, Waiting, place
from bdn.core.training.states import ACTIVE, OVER, SILENT_SECONDS, Failure, advance
from bdn.core.units import counted
from bdn.mirror.db import training
from bdn.mirror.db.agents import Name
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.secrets import SecretTable
from bdn.mirror.db.tables import Json, TrainingJobRow
from bdn.mirror.db.training import JobAgent
from bdn.mirror.db.waiting import JOBS_CHANGED
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.training.documents import spec_of
from bdn.mirror.training.loading import loaded
from bdn.mirror.training.runs import login_of
from bdn.mirror.training.steps import Steps, failure_in, failure_of, is_own_mirror, job_of, ns_of
from bdn.wire.training_schema import TrainingJobSpec

CLAIM_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 3600.0  # without a line, after which a client that reads two hours at a time would stop
_UPKEEP_SECONDS: Final = 60.0
_LOG_SECONDS: Final = 7 * 86400.0  # from the end of a job
_UNUSED_SECONDS: Final = 3600.0  # from the commit of an archive, whose job is recorded right after it
_GAP_SECONDS: Final = 15.0

logger = logging.getLogger(__name__)


class MissingSecretsError(SecretNotFoundError):
    """Secrets that an organisation has not set. The operator's own secrets are not for jobs."""

    def describe(self) -> str:
        return (
            f"the organisation has no secret {self.secret_name}: set it with 'bdn-admin secrets set NAME'; secrets in the mirror's "
            "environment and in BDN_SECRETS_DIR are for sources alone"
        )


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a job needs of nodes. It never changes."""

    demand: Demand
    has_cache: bool
    require_cache_affinity: bool


@dataclass(frozen=True, slots=True)
class _Placed:
    cluster: str
    nodes: Sequence[Node]


_Outcome = _Placed | Waiting | Failure


@dataclass
class Controller:
    """Nodes are not judged as silent before this controller has run for a minute without a gap: see ``_judges``."""

    database: Database
    requests: MirrorRequests
    projects: Projects
    secrets: SecretTable
    steps: Steps
    name: str = field(default_factory=lambda: f"{socket.gethostname()[:200]}:{os.getpid()}:{os.urandom(4).hex()}")
    _needs: dict[str, _Needs] = field(default_factory=dict)  # by job: a request takes a millisecond to parse
    _running_since: float | None = None
    _ran_at: float = 0.0
    _upkeep_at: float = 0.0

    async def run(self) -> None:
        """Run until canceled: at each change, and twice a second."""
        topic = self.database.watch.topic(JOBS_CHANGED)
        while True:
            changes = topic.changes
            with self._surviving():
                await self.look()
            await topic.changed(changes, POLL_SECONDS)

    @contextmanager
    def _surviving(self, job: str | None = None) -> Iterator[None]:
        """A failure of one job ends neither the controller nor other jobs."""
        facts = {} if job is None else {"job": job}
        try:
            yield
        except BdnError as error:  # the database is away
            if job is None:
                self._running_since = None
            logger.warning("cannot advance training jobs now; retrying", extra={**facts, "error": str(error)})
        except Exception:
            logger.exception("advancing training jobs failed; retrying", extra=facts)

    async def look(self) -> None:
        now = self.database.now()
        judges = self._judges(now)
        async with self.database.read() as session:
            rows = await training.active(session)
            awaited = [row.mirror_id for row in rows if row.status == "CREATED" and row.mirror_id is not None]
            ended = await training.mirrors_that_ended(session, awaited) if awaited else {}
            agents = await training.job_agents(session, now) if rows else {}
        self._needs = {row.id: self._needs[row.id] for row in rows if row.id in self._needs}
        ready: list[str] = []
        for row in rows:
            with self._surviving(row.id):
                status, error = ended.get(row.mirror_id or "", (None, None))
                if row.status == "CREATED" and row.mirror_id is None:
                    await self._prepare(row.id, now)
                elif row.status == "PENDING" or (row.status == "CREATED" and status == "READY"):
                    ready.append(row.id)
                elif row.status == "CREATED" and status is not None:
                    canceled = Failure("CANCELED", f"the job's mirror is {status}")
                    await self._fail(row.id, failure_in(error) or canceled)
                elif judges and _lost(row, agents, now):
                    await self._lose(row.id, now)
                elif advance(job := job_of(row), now) is not job:
                    await self._take(row.id)
        with self._surviving():
            await self._place(ready, now)
        if now - self._upkeep_at >= _UPKEEP_SECONDS:
            with self._surviving():
                await self._upkeep(now)
                self._upkeep_at = now
        if (done_at := self.database.now()) - now < SILENT_SECONDS / 2:  # longer: an outage rather than many jobs
            self._ran_at = done_at

    def _judges(self, now: float) -> bool:
        """Whether silence is the nodes'.

        After an outage of the mirror, the database or this process no node has a recent heartbeat. If all of them
        counted as lost, every job would fail.
        """
        if self._running_since is None or now - self._ran_at > _GAP_SECONDS:
            self._running_since = now
        self._ran_at = now
        return now - self._running_since >= SILENT_SECONDS

    # --- CREATED ---

    async def _prepare(self, job: str, now: float) -> None:
        """Check what the job needs of the world, and request its mirror. Takes no node."""
        claimant = f"{self.name}:{os.urandom(4).hex()}"
        async with self.database.write() as session:
            if not await training.claim(session, job, claimant, now, now + CLAIM_SECONDS):
                return
        async with self.database.read() as session:
            row = await training.read(session, job)
        if row is None:
            return
        extras: list[Json] = row.extras
        warnings: list[str] = []
        mirror: str | None = None
        failure: Failure | None = None
        try:
            spec = spec_of(row)
            await self._check_secrets(row.organisation, spec)
            async with self.database.read() as session:
                nodes = _nodes(await training.job_agents(session, now), [], now)
                outcome = await self._outcome(session, row, nodes)
            if isinstance(outcome, Failure):
                failure = outcome
            else:
                more, warnings = await self._loaded(row, spec)
                extras = [*extras, *more]
                sources = [*spec.sources(), *map(_source, extras)]
                mirror = (await self.requests.request(sources, row.organisation, row.requester_team)).id
        except StoreUnavailableError:
            raise
        except BdnError as error:
            failure = failure_of(error)
        except Exception as error:
            logger.exception("preparing a training job failed", extra={"job": job})
            failure = failure_of(InternalError(f"{type(error).__name__} while preparing the job"))
        async with self.database.write() as session:
            fresh = await training.lock(session, job)
            if fresh is None or fresh.status != "CREATED" or fresh.claimed_by != claimant:
                is_unused = mirror is not None and is_own_mirror(extras)
            else:
                is_unused = False
                fresh.claimed_by = fresh.claim_expires_at = None
                fresh.extras, fresh.mirror_id = extras, mirror
                if warnings:
                    await self.steps.say(session, fresh, now, *warnings)
                if failure is not None:
                    await self.steps.fail(session, fresh, self.database.now(), failure)
        if is_unused and mirror is not None and (fresh is None or fresh.status not in ACTIVE):
            await self.requests.cancel(mirror, row.organisation, row.requester_team)

    async def _check_secrets(self, organisation: str, spec: TrainingJobSpec) -> None:
        """Raises ``MissingSecretsError``, which names all that are missing, or ``SecretMalformedError``."""
        values = {name: await self.secrets.value(organisation, name) for name in spec.secret_names}
        if missing := [name for name, value in values.items() if value is None]:
            raise MissingSecretsError(", ".join(map(repr, missing)))
        if (login := spec.login_secret) is not None:
            login_of(*login, str(values[login[1]]))

    async def _loaded(self, row: TrainingJobRow, spec: TrainingJobSpec) -> tuple[list[Json], list[str]]:
        """The checkpoints to load as sources, and warnings."""
        folder, loading = spec.places.loaded, spec.runtime.loading
        if folder is None or loading is None:
            return [], []
        async with self.database.read() as session:
            return await loaded(session, row, loading.checkpoints or [], folder, spec.compute.demand.nodes)

    # --- PENDING ---

    async def _place(self, ready: Sequence[str], now: float) -> None:
        """Place what has room, by priority and age, all ranks or none; what waits reserves its kind of nodes."""
        if not ready:
            return
        async with self.database.read() as session:
            due = {row.id for row, outcome in await self._outcomes(session, ready, now) if _is_news(row, outcome)}
        if not due:
            return
        async with self.database.write() as session:
            await training.lock_placement(session)
            for job in sorted(due):  # in one order, as all that lock several
                await training.lock(session, job)
            for row, outcome in await self._outcomes(session, ready, now):
                if row.id in due and _is_news(row, outcome):
                    await self._settle(session, row, outcome, now)

    async def _outcomes(
        self, session: ReadSession, ready: Sequence[str], now: float
    ) -> list[tuple[TrainingJobRow, _Outcome]]:
        rows = await training.active(session)
        agents = await training.job_agents(session, now)
        nodes = _nodes(agents, rows, now)
        outcomes: list[tuple[TrainingJobRow, _Outcome]] = []
        for row in rows:
            if row.id not in ready or row.status not in ("CREATED", "PENDING") or row.ending_at is not None:
                continue
            outcome = await self._outcome(session, row, nodes)
            demand = (await self._needs_of(session, row)).demand
            if isinstance(outcome, _Placed):
                nodes = [_taken(node, demand) if node in outcome.nodes else node for node in nodes]
            elif isinstance(outcome, Waiting):
                nodes = [_reserved(node, demand, outcome.cluster) for node in nodes]
            outcomes.append((row, outcome))
        return outcomes

    async def _needs_of(self, session: ReadSession, row: TrainingJobRow) -> _Needs:
        if (known := self._needs.get(row.id)) is None:
            spec = TrainingJobSpec.model_validate(await training.read_request(session, row))
            cache = spec.runtime.cache
            requires = cache is None or cache.require_cache_affinity is not False
            known = self._needs[row.id] = _Needs(spec.compute.demand, cache is not None, requires)
        return known

    async def _outcome(self, session: ReadSession, row: TrainingJobRow, nodes: Sequence[Node]) -> _Outcome:
        needs, project = await self._needs_of(session, row), await training.project_of(session, row)
        demand, requires = needs.demand, needs.require_cache_affinity
        pinned = project.cache_cluster if needs.has_cache else None
        try:
            found = place(demand, nodes, project.name, pinned, require_cache_affinity=requires)
        except CacheAffinityError as error:
            return failure_of(error)
        if isinstance(found, Failure) and row.status == "PENDING":  # its cluster may come back
            return Waiting(row.cluster or "", f"needs {demand}, which no cluster has now")
        return _Placed(*found) if isinstance(found, tuple) else found

    async def _settle(self, session: WriteSession, row: TrainingJobRow, outcome: _Outcome, now: float) -> None:
        match outcome:
            case Failure():
                await self.steps.fail(session, row, now, outcome)
            case Waiting():
                if row.status != "PENDING":
                    await self.steps.enter(session, row, now, "PENDING", f"mirrored; the job {outcome.reason}")
                row.waiting_for, row.updated_at = outcome.reason, now
            case _Placed():
                agents = await training.job_agents(session, now)
                demand = (await self._needs_of(session, row)).demand
                row.cluster = outcome.cluster
                placed = [agents[node.cluster, node.name] for node in outcome.nodes]
                row.ranks = [
                    {"node": agent.node, "boot_id": agent.boot_id, "gpus": demand.gpus, "state": "STAGING"}
                    for agent in placed
                ]
                names = ", ".join(node.name for node in outcome.nodes)
                line = f"mirrored; staging on {counted(len(placed), 'node')} of cluster {outcome.cluster}: {names}"
                await self.steps.enter(session, row, now, "DEPLOYING", line)
                training.note_change(session, row)

    # --- what only time or silence makes due ---

    async def _fail(self, job: str, failure: Failure) -> None:
        async with self.database.write() as session:
            if (row := await training.lock(session, job)) is not None:
                await self.steps.fail(session, row, self.database.now(), failure)

    async def _take(self, job: str) -> None:
        async with self.database.write() as session:
            if (row := await training.lock(session, job)) is not None:
                await self.steps.take(session, row, self.database.now())

    async def _lose(self, job: str, now: float) -> None:
        async with self.database.write() as session:
            row = await training.lock(session, job)
            lost = _lost(row, await training.job_agents(session, now), now) if row is not None else []
            if row is not None and lost:
                row.ranks = [
                    {**rank, "state": "LOST"} if number in lost else rank for number, rank in enumerate(row.ranks)
                ]
                await self.steps.take(session, row, now)

    async def _upkeep(self, now: float) -> None:
        """Delete old logs, and archives without a job. Let no active job be silent for an hour."""
        async with self.database.read() as session:
            quiet = await training.silent_since(session, ns_of(now - _QUIET_SECONDS))
        for job in quiet:
            async with self.database.write() as session:
                row = await training.lock(session, job)
                if row is not None and row.status in ACTIVE:
                    await self.steps.say(session, row, now, f"no output for an hour; the job is {row.status}")
        async with self.database.write() as session:
            await training.expire_logs(session, now - _LOG_SECONDS)
        await self.projects.remove_unused_archives(now - _UNUSED_SECONDS)


def _source(extra: Json) -> WeightsSource:
    return WeightsSource(parse_source(extra["source"]), extra["mount_location"])


def _lost(row: TrainingJobRow, agents: dict[Name, JobAgent], now: float) -> list[int]:
    """The ranks whose nodes have sent no heartbeat for a minute, or have restarted since the placement."""
    return [
        number
        for number, rank in enumerate(row.ranks)
        if rank["state"] not in OVER
        and (
            (agent := agents.get((str(row.cluster), rank["node"]))) is None
            or now - agent.last_heartbeat >= SILENT_SECONDS
            or agent.boot_id != rank["boot_id"]
        )
    ]


def _nodes(agents: dict[Name, JobAgent], rows: Sequence[TrainingJobRow], now: float) -> list[Node]:
    """The nodes, with what the ranks of these jobs take of them."""
    nodes = {
        name: Node(
            agent.cluster,
            agent.node,
            agent.capacity["gpu_type"],
            agent.capacity["gpus"],
            agent.capacity["slots"],
            is_alive=agent.is_alive(now),
        )
        for name, agent in agents.items()
    }
    for row in rows:
        for rank in row.ranks:
            name = str(row.cluster), rank["node"]
            if rank["state"] not in OVER and (node := nodes.get(name)) is not None:
                nodes[name] = _taken(node, Demand(1, "", rank["gpus"]))
    return sorted(nodes.values(), key=lambda node: (node.cluster, node.name))


def _taken(node: Node, demand: Demand) -> Node:
    if demand.gpus:
        return replace(node, gpus_used=node.gpus_used + demand.gpus)
    return replace(node, slots_used=node.slots_used + 1)


def _reserved(node: Node, demand: Demand, cluster: str) -> Node:
    """A job that waits is not overtaken by smaller ones that would take its nodes one by one."""
    if node.cluster != cluster or not node.suits(demand):
        return node
    return replace(node, gpus_used=node.gpus) if demand.gpus else replace(node, slots_used=node.slots)


def _is_news(row: TrainingJobRow, outcome: _Outcome) -> bool:
    return not (isinstance(outcome, Waiting) and row.status == "PENDING" and row.waiting_for == outcome.reason)
