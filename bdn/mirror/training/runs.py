"""Runs on nodes: what agents are commanded, what they report, and what a rank needs to start."""

import base64
import binascii
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from bdn.core.chunk import Digest
from bdn.core.errors import NotFoundError, SecretMalformedError, SecretNotFoundError
from bdn.core.events import Event
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.environment import ARCHIVE, SCRATCH, RankOf, environment
from bdn.core.training.states import ACTIVE, OVER, Want, can_follow
from bdn.mirror.access.callers import Caller
from bdn.mirror.db import events, training
from bdn.mirror.db.agents import Name
from bdn.mirror.db.database import Database, tell
from bdn.mirror.db.secrets import SecretTable
from bdn.mirror.db.tables import Json, ProjectRow, TrainingJobRow
from bdn.mirror.db.training import is_pod
from bdn.mirror.db.waiting import JOBS_CHANGED, SharedRead
from bdn.mirror.jobs.caches import TrainingCaches
from bdn.mirror.training.documents import spec_of
from bdn.mirror.training.logs import Logs
from bdn.mirror.training.manifests import leader_of
from bdn.mirror.training.steps import Steps, is_own_mirror, wants_of
from bdn.wire.access_schema import Role
from bdn.wire.cache_schema import CacheRequest
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, PushGrant
from bdn.wire.heartbeat_schema import Command, Report
from bdn.wire.run_schema import CachePlaces, RegistryLogin, RunCommand, RunOutput, RunReport, RunSpec, is_run
from bdn.wire.training_schema import TrainingJobSpec

_PUSH_SECONDS: Final = 30 * 86400.0  # validity of a rank's grant to push
_OLD_SECONDS: Final = 0.5
_PROGRESS_SECONDS: Final = 0.05  # for each rank, between two writes of a rank's bytes: a write has all ranks of a job
_BYTES_SECONDS: Final = 1.0  # at least, between two writes of a rank's bytes
_SCRATCH_SECONDS: Final = 10.0  # the same where only its scratch has changed, which a job may write all the time
_BYTES: Final = {"bytes_done", "bytes_total", "eta_seconds"}
_SCRATCH: Final = {"scratch_bytes", "scratch_limit_bytes"}
_LOOPBACK: Final = "127.0.0.1"
_CPU: Final = "CPU"
_Wants = dict[Name, list[tuple[str, int, Want]]]  # by agent: job, rank and command


def login_of(registry: str, secret: str, value: str) -> RegistryLogin:
    """The login in a secret: ``user:password``, plain or in base64. Raises ``SecretMalformedError``."""
    if ":" not in value:
        try:
            value = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            value = ""
    user, separator, password = value.strip().partition(":")
    if not separator:
        raise SecretMalformedError(secret, "is not user:password, plain or in base64")
    return RegistryLogin(registry=registry, username=user, password=password)


@dataclass
class JobRuns:
    """Commands are a function of the rows: repeated until reported, also after a restart of either side."""

    database: Database
    signer: GrantSigner
    grant_seconds: int
    secrets: SecretTable
    caches: TrainingCaches
    steps: Steps
    logs: Logs
    _wants: SharedRead[_Wants] = field(init=False)

    def __post_init__(self) -> None:
        self._wants = SharedRead(self._read_wants, _OLD_SECONDS, topic=self.database.watch.topic(JOBS_CHANGED))

    # --- heartbeats ---

    async def asked(self) -> Collection[Name]:
        """The agents that have commands, including those that they are carrying out."""
        return (await self._wants.get()).keys()

    async def commands(self, cluster: str, node: str, running: Collection[str]) -> list[Command]:
        """The commands for an agent, without those in ``running``, and stops of runs that it should not have."""
        wanted = (await self._wants.get()).get((cluster, node), [])
        commands = [_command(*one) for one in wanted]
        known = {(job, rank) for job, rank, _ in wanted}
        carried_out = filter(None, map(RunCommand.of, filter(is_run, running)))
        strays = {(command.run, command.rank) for command in carried_out} - known
        if strays:
            commands += await self._stops(cluster, node, strays)
        return [command for command in commands if command.id not in running]

    async def _stops(self, cluster: str, node: str, strays: Collection[tuple[str, int]]) -> list[Command]:
        """Of runs that are over for the mirror: their node was lost, or their job deleted. Read anew."""
        async with self.database.read() as session:
            rows = {job: await training.read(session, job, has_request=False) for job in {job for job, _ in strays}}
        stops: list[Command] = []
        for job, rank in sorted(strays):
            row = rows[job]
            record = None if row is None else _record_of(row, rank, cluster, node)
            if row is None or record is None or not _is_going(row, record):
                stops.append(_command(job, rank, "stop"))
        return stops

    async def _read_wants(self) -> _Wants:
        wants: _Wants = defaultdict(list)
        async with self.database.read() as session:
            rows = await training.active(session)
        self.logs.forget_others({row.id for row in rows})
        for row in rows:
            for number, want in enumerate(wants_of(row)):
                if want is not None and not is_pod(row.ranks[number]):
                    wants[str(row.cluster), row.ranks[number]["node"]].append((row.id, number, want))
        return wants

    async def record(self, cluster: str, node: str, reports: Sequence[Report]) -> None:
        """Record what an agent reports of its ranks, with the steps that this makes due."""
        runs = [report.run or _failed(report) for report in reports]
        await self.record_ranks(cluster, node, [run for run in runs if run is not None])

    async def record_ranks(self, cluster: str, node: str | None, reports: Sequence[RunReport]) -> None:
        """Record reports of an agent's ranks, or of ranks that are pods (``node`` None)."""
        by_job: dict[str, list[RunReport]] = defaultdict(list)
        for report in reports:
            by_job[report.run].append(report)
        for job, runs in by_job.items():
            async with self.database.read() as session:
                row = await training.read(session, job, has_request=False)
            now = self.database.now()
            if row is None or _reported(row, cluster, node, runs, now) == row.ranks:
                continue
            async with self.database.write() as session:
                row = await training.lock(session, job, has_request=False)
                if row is not None:
                    before = wants_of(row)
                    row.ranks = _reported(row, cluster, node, runs, now)
                    if wants_of(row) != before:  # not for each byte: every waiting agent would look at all jobs
                        tell(session, JOBS_CHANGED)
                    await self.steps.take(session, row, now)

    # --- calls of agents and pods ---

    async def spec(
        self, job: str, rank: int, caller: Caller, *, node: str, boot_id: str, volume: str | None
    ) -> RunSpec:
        """All that a rank needs, with grants signed and secrets resolved now.

        ``boot_id``: of the agent's machine, or the uid of the rank's pod. Raises ``NotFoundError`` for another agent or
        pod than the rank's, for an agent that has restarted its machine since, and once the rank is over.
        """
        async with self.database.read() as session:
            row = await training.read(session, job)
            record = _own_record(row, rank, caller) if row is not None else None
            is_its = record is not None and (record["node"], record["boot_id"]) == (node, boot_id)
            if row is None or record is None or not is_its or not _is_going(row, record):
                raise NotFoundError(f"rank {rank} of run {job}")
            project = await training.project_of(session, row)
            sources = await training.mirrored(session, str(row.mirror_id))
            agents = await training.job_agents(session, self.database.now())
        spec = spec_of(row)
        first = agents.get((str(row.cluster), row.ranks[0]["node"]))
        leader = leader_of(row.id) if is_pod(record) else _host(first.advertise if first is not None else None)
        of = RankOf(
            job_id=row.id,
            job_name=row.name,
            project_id=project.id,
            project_name=project.name,
            rank=rank,
            group_size=len(row.ranks),
            gpus=record["gpus"],
            leader=leader,
        )
        secrets = await self._secrets(row, spec.secret_names, rank=rank, node=record["node"])
        mounts = _mounts(row, rank, sources, len(spec.weights or ()))
        places, expires_at = spec.places, self.database.now() + self.grant_seconds
        read = Grant(row.organisation, mounts, expires_at, row.requester_team, row.mirror_id)
        push = PushGrant(
            row.organisation,
            CheckpointUri(project.id, row.id, None, rank),
            self.database.now() + _PUSH_SECONDS,
            project.team,
        )
        secret = {variable: secrets[name] for variable, name in spec.runtime.secrets.items()}
        login = spec.login_secret
        checkpointing = spec.runtime.checkpointing
        return RunSpec(
            run=row.id,
            rank=rank,
            gpus=of.gpus,
            image=spec.image.base_image if spec.image is not None else None,
            login=None if login is None else login_of(*login, secrets[login[1]]),
            cpus=spec.compute.cpu_count,
            memory_bytes=spec.compute.memory_bytes,
            commands=list(spec.runtime.start_commands or ()),
            environment=environment(of, places, spec.runtime.plain, secret),
            working_dir=places.working,
            archive=ARCHIVE if is_own_mirror(row.extras) else None,
            read_grant=self.signer.sign(read) if mounts else None,
            scratch=SCRATCH,
            checkpoints=places.checkpoints,
            checkpoint_bytes=checkpointing.size_bytes if checkpointing is not None else None,
            push_grant=self.signer.sign(push) if checkpointing is not None else None,
            caches=None
            if places.caches is None
            else CachePlaces(
                project=places.project_cache, team=places.team_cache, huggingface=places.huggingface_cache
            ),
            cache_grant=None if is_pod(record) else await self._cache_grant(row, project, spec, volume),
            loaded=places.loaded,
        )

    async def login(self, row: TrainingJobRow, spec: TrainingJobSpec) -> RegistryLogin | None:
        """The login to the registry of a job's image, for a cluster. Raises ``CallerError`` if the secret has none."""
        if (login := spec.login_secret) is None:
            return None
        registry, name = login
        return login_of(registry, name, (await self._secrets(row, [name], rank=0, node=f"cluster {row.cluster}"))[name])

    async def _secrets(self, row: TrainingJobRow, names: Sequence[str], **given_to: Any) -> dict[str, str]:  # noqa: ANN401 - facts
        """The values by their names. That they were given out is an event. Raises ``SecretNotFoundError``."""
        values: dict[str, str] = {}
        for name in names:
            value = await self.secrets.value(row.organisation, name)
            if value is None:
                raise SecretNotFoundError(name)
            values[name] = value
        if values:
            async with self.database.write() as session:
                facts: dict[str, Any] = {"job": row.id, **given_to, "names": sorted(values)}
                given = Event.of("secrets_given", facts, organisation=row.organisation)
                await events.record(session, self.database.now(), [given])
        return values

    async def _cache_grant(
        self, row: TrainingJobRow, project: ProjectRow, spec: TrainingJobSpec, volume: str | None
    ) -> str | None:
        cache = spec.runtime.cache
        if cache is None:
            return None
        if volume is None:
            raise NotFoundError(f"a volume of training caches on this node, which training job {row.id} needs")
        cluster = str(row.cluster)
        body = CacheRequest(
            project=project.id,
            cluster=cluster,
            volume_id=volume,
            require_cache_affinity=cache.require_cache_affinity is not False,
            gpu_type=spec.compute.demand.gpu_type or _CPU,  # without one, a pinned cluster would always suit
            offered_in=[cluster],
        )
        return (await self.caches.grant(body, row.organisation, project.team)).grant

    async def append(self, job: str, rank: int, caller: Caller, output: RunOutput) -> None:
        """Store lines of a rank's output. Raises ``NotFoundError`` for a rank of another cluster or pod, or none."""
        async with self.database.read() as session:
            row = await training.read(session, job, has_request=False)
        if row is None or _own_record(row, rank, caller) is None:
            raise NotFoundError(f"rank {rank} of run {job}")
        await self.logs.append(row, rank, output.seq, output.lines)


def _command(job: str, rank: int, want: Want) -> Command:
    command = RunCommand(run=job, rank=rank, want=want)
    return Command(id=command.id, run=command)


def _failed(report: Report) -> RunReport | None:
    """An agent that cannot carry a command out reports an error alone."""
    command = RunCommand.of(report.id)
    if report.error is None or command is None:
        return None
    return RunReport(run=command.run, rank=command.rank, state="ENDED", error=report.error)


def _record_of(row: TrainingJobRow, rank: int, cluster: str, node: str | None) -> Json | None:
    """The rank's record, if it was placed on this agent, or is a pod (``node`` None)."""
    if cluster != row.cluster or not 0 <= rank < len(row.ranks):
        return None
    record: Json = row.ranks[rank]
    return record if (None if is_pod(record) else record["node"]) == node else None


def _own_record(row: TrainingJobRow, rank: int, caller: Caller) -> Json | None:
    """The record of a rank of the caller: a pod has its own, an agent each rank on an agent of its cluster, an operator all."""
    if caller.cluster not in (None, row.cluster) or not 0 <= rank < len(row.ranks):
        return None
    record: Json = row.ranks[rank]
    pod = record["boot_id"] if is_pod(record) else None
    return record if caller.role is Role.OPERATOR or caller.pod == pod else None


def _is_going(row: TrainingJobRow, record: Json) -> bool:
    return row.status in ACTIVE and record["state"] not in OVER


def _reported(
    row: TrainingJobRow, cluster: str, node: str | None, reports: Sequence[RunReport], now: float
) -> list[Json]:
    """The ranks after these reports. Those that are late, repeated or another node's change nothing."""
    ranks: list[Json] = list(row.ranks)
    for report in reports:
        is_its = row.status in ACTIVE and _record_of(row, report.rank, cluster, node) is not None
        if not is_its or not can_follow((before := ranks[report.rank])["state"], report.state):
            continue
        after = {**before, **report.model_dump(mode="json", exclude={"run", "rank"})}
        for name in ("exit_code", *_SCRATCH):
            if after[name] is None:  # a report that was delayed, or of an agent that has restarted
                after[name] = before.get(name)
        has_exited = after["exit_code"] is not None or report.state == "ENDED"
        after["exited_at"] = before.get("exited_at") or (now if has_exited else None)
        changed = {name for name, value in after.items() if value != before.get(name)}
        if changed and now - before.get("reported_at", 0.0) >= _pause(changed, len(ranks)):
            ranks[report.rank] = {**after, "reported_at": now}
    return ranks


def _pause(changed: set[str], ranks: int) -> float:
    """Seconds between two writes of a rank in which these fields have changed."""
    if not changed <= _BYTES | _SCRATCH:
        return 0.0
    return max(_SCRATCH_SECONDS if changed <= _SCRATCH else _BYTES_SECONDS, ranks * _PROGRESS_SECONDS)


def _mounts(row: TrainingJobRow, rank: int, sources: Sequence[Any], weights: int) -> tuple[GrantedMount, ...]:
    """The rank's part of what the job's mirror recorded: the weights, then the extras."""
    own = [None] * weights + [extra["ranks"] for extra in row.extras]
    return tuple(
        GrantedMount.at(source.mount_location, Digest(source.manifest), source.source, source.resolved_revision)
        for source, ranks in zip(sources, own, strict=True)
        if ranks is None or rank in ranks
    )


def _host(advertise: str | None) -> str:
    """The host of an agent's address; loopback if it has none, as on a cluster of one machine."""
    address = advertise or ""
    return urlsplit(address if "//" in address else f"//{address}").hostname or _LOOPBACK
