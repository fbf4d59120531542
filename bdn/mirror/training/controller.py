"""The controller: prepares jobs, places them, and takes the steps that only time makes due. Any number may run.

What takes several transactions (``_prepare``) is claimed for 15 s, and another controller resumes it when the claim
expires. All else is one transaction on locked rows, which reads what it decides on.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.errors import (
    BdnError,
    CacheAffinityError,
    InternalError,
    SecretNotFoundError,
    StoreUnavailableError,
    single_error,
)
from bdn.core.source.uri import WeightsSource, parse_source
from bdn.core.training.placement import Demand, Node, Waiting, place
from bdn.core.training.states import ACTIVE, Failure, advance
from bdn.mirror.db import training
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.secrets import SecretTable
from bdn.mirror.db.tables import Json, TrainingJobRow
from bdn.mirror.db.training import runs_as_pods
from bdn.mirror.db.waiting import JOBS_CHANGED
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.projects import Projects
from bdn.mirror.training.agents import Agents, reserved, taken
from bdn.mirror.training.documents import spec_of
from bdn.mirror.training.loading import loaded
from bdn.mirror.training.pods import Pods
from bdn.mirror.training.runners import Runner, surviving
from bdn.mirror.training.runs import login_of
from bdn.mirror.training.steps import Steps, failure_in, failure_of, is_own_mirror, job_of, ns_of
from bdn.wire.training_schema import TrainingJobSpec

CLAIM_SECONDS: Final = 15.0
POLL_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 3600.0  # without a line, after which a client that reads two hours at a time would stop
_UPKEEP_SECONDS: Final = 60.0
_LOG_SECONDS: Final = 7 * 86400.0  # from the end of a job
_PAUSE_SECONDS: Final = 0.1  # between two turns of one cluster's pods, whatever changes meanwhile
_GENTLY: Final = 4.0  # times what a turn takes beyond POLL_SECONDS
_UNUSED_SECONDS: Final = 3600.0  # from the commit of an archive, whose job is recorded right after it

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
    """``pods``: for each cluster of Kubernetes that runs jobs. Other clusters have ``agents``."""

    database: Database
    requests: MirrorRequests
    projects: Projects
    secrets: SecretTable
    steps: Steps
    pods: Sequence[Pods] = ()
    name: str = field(default_factory=lambda: f"{socket.gethostname()[:200]}:{os.getpid()}:{os.urandom(4).hex()}")
    _needs: dict[str, _Needs] = field(default_factory=dict)  # by job: a request takes a millisecond to parse
    _upkeep_at: float = 0.0
    agents: Agents = field(init=False)

    def __post_init__(self) -> None:
        self.agents = Agents(self.database, self.steps)

    async def run(self) -> None:
        """Run until canceled: at each change, and twice a second. A cluster that does not answer delays no other jobs."""
        with single_error():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._repeat(self.look))
                for pods in self.pods:
                    group.create_task(self._repeat(partial(self._look_gently, pods)))

    async def _repeat(self, turn: Callable[[], Awaitable[None]]) -> None:
        topic = self.database.watch.topic(JOBS_CHANGED)
        while True:
            changes = topic.changes
            with surviving(on_outage=self.agents.note_outage):
                await turn()
            await topic.changed(changes, POLL_SECONDS)

    async def _look_gently(self, pods: Pods) -> None:
        """A turn, and a pause that grows with a long one: a thousand pods are 12 MB for the API server in each turn of each process."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.look_at(pods)
        await asyncio.sleep(max(_PAUSE_SECONDS, _GENTLY * (loop.time() - began - POLL_SECONDS)))

    async def look_at(self, pods: Pods) -> None:
        """One turn of the jobs that run as pods of this cluster."""
        async with self.database.read() as session:
            rows = [row for row in await training.active(session) if runs_as_pods(row) and row.cluster == pods.cluster]
        await pods.look(rows, self.database.now())

    async def look(self) -> None:
        now = self.database.now()
        async with self.database.read() as session:
            rows = await training.active(session)
            awaited = [row.mirror_id for row in rows if row.status == "CREATED" and row.mirror_id is not None]
            ended = await training.mirrors_that_ended(session, awaited) if awaited else {}
        await self.agents.look([row for row in rows if not runs_as_pods(row)], now)
        self._needs = {row.id: self._needs[row.id] for row in rows if row.id in self._needs}
        ready: list[str] = []
        for row in rows:
            with surviving(row.id):
                status, error = ended.get(row.mirror_id or "", (None, None))
                if row.status == "CREATED" and row.mirror_id is None:
                    await self._prepare(row.id, now)
                elif _is_unplaced(row) and (row.status == "PENDING" or status == "READY"):
                    ready.append(row.id)
                elif row.status == "CREATED" and status is not None:
                    canceled = Failure("CANCELED", f"the job's mirror is {status}")
                    await self._fail(row.id, failure_in(error) or canceled)
                elif advance(job := job_of(row), now) is not job:
                    await self._take(row.id)
        with surviving(on_outage=self.agents.note_outage):
            await self._place(ready, now)
        if now - self._upkeep_at >= _UPKEEP_SECONDS:
            with surviving(on_outage=self.agents.note_outage):
                await self._upkeep(now)
                self._upkeep_at = now
        self.agents.note_turn(now, self.database.now())

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
                nodes = await self.agents.nodes(session, [], now)
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
        nodes = await self.agents.nodes(session, rows, now)
        outcomes: list[tuple[TrainingJobRow, _Outcome]] = []
        for row in rows:
            if row.id not in ready or not _is_unplaced(row) or row.ending_at is not None:
                continue
            outcome = await self._outcome(session, row, nodes)
            demand = (await self._needs_of(session, row)).demand
            if isinstance(outcome, _Placed):
                nodes = [taken(node, demand) if node in outcome.nodes else node for node in nodes]
            elif isinstance(outcome, Waiting):
                nodes = [reserved(node, demand, outcome.cluster) for node in nodes]
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
        offered = [node for pods in self.pods for node in pods.offer(row.organisation, project.team, demand)]
        try:
            found = place(demand, [*nodes, *offered], project.name, pinned, require_cache_affinity=requires)
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
                demand = (await self._needs_of(session, row)).demand
                await self._runner_of(outcome).start(session, row, outcome.nodes, demand.gpus, now)

    def _runner_of(self, placed: _Placed) -> Runner:
        is_named = any(node.name for node in placed.nodes)
        return self.agents if is_named else next(pods for pods in self.pods if pods.cluster == placed.cluster)

    # --- what only time or silence makes due ---

    async def _fail(self, job: str, failure: Failure) -> None:
        async with self.database.write() as session:
            if (row := await training.lock(session, job)) is not None:
                await self.steps.fail(session, row, self.database.now(), failure)

    async def _take(self, job: str) -> None:
        async with self.database.write() as session:
            if (row := await training.lock(session, job)) is not None:
                await self.steps.take(session, row, self.database.now())

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


def _is_unplaced(row: TrainingJobRow) -> bool:
    """Pods are PENDING until Kubernetes has placed them, with the ranks that they will be."""
    return row.status in ("CREATED", "PENDING") and not row.ranks


def _is_news(row: TrainingJobRow, outcome: _Outcome) -> bool:
    return not (isinstance(outcome, Waiting) and row.status == "PENDING" and row.waiting_for == outcome.reason)
