"""The runner of pods: makes a Job of Kubernetes for each training job of a cluster, and reports its pods as ranks.

Nothing is claimed: objects have fixed names, creating and deleting them is idempotent, and each turn lists what is there.
While the API server does not answer, states stay as they are.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from bdn.core.errors import BdnError
from bdn.core.training.placement import Demand, Node
from bdn.core.training.states import ACTIVE, OVER, Failure
from bdn.core.units import counted
from bdn.mirror.access.clusters import KubernetesCluster, PodJobs
from bdn.mirror.db import agents, training
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.identity import database_id
from bdn.mirror.db.tables import TrainingJobRow
from bdn.mirror.training import manifests
from bdn.mirror.training.described import Describer
from bdn.mirror.training.kubernetes_api import ApiConnection, ClusterUnavailableError, KubernetesApi, KubernetesJob, Pod
from bdn.mirror.training.manifests import JOB_LABEL, OWNER_LABEL, WANT, name_of
from bdn.mirror.training.pod_reports import has_ended, is_settled, pod_for, report_of, waits_for
from bdn.mirror.training.runners import surviving
from bdn.mirror.training.runs import JobRuns
from bdn.mirror.training.steps import Steps, failure_of, wants_of
from bdn.wire.progress import total_of

_STRAYS_SECONDS: Final = 60.0
_AT_ONCE: Final = 16  # calls about the pods of one job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The Jobs and pods of some training jobs, by training job."""

    jobs: Mapping[str, KubernetesJob]
    pods: Mapping[str, Sequence[Pod]]


@dataclass
class Pods:
    """The runner of one cluster, which has ``jobs`` in ``BDN_KUBERNETES``."""

    cluster: str
    trusted: KubernetesCluster
    jobs: PodJobs
    api: KubernetesApi
    database: Database
    steps: Steps
    runs: JobRuns
    describer: Describer
    _made: set[str] = field(default_factory=set)  # by this process: all objects of the job are there
    _strays_at: float = -inf
    _problem: str = ""

    def offer(self, organisation: str, team: str, demand: Demand) -> list[Node]:
        """Nodes with room for a job of a team, as many as it needs: Kubernetes queues, and has the last word.

        They have no name and nothing to spare, so ``place`` takes them before all agents' nodes of the cluster.
        """
        knows_gpu = not demand.gpus or self.jobs.gpu(demand.gpu_type or "") is not None
        if self.trusted.jobs_in(organisation, team) is None or not knows_gpu:
            return []
        return [Node(self.cluster, "", demand.gpu_type, demand.gpus, slots=1)] * demand.nodes

    async def start(
        self, session: WriteSession, row: TrainingJobRow, nodes: Sequence[Node], gpus: int, now: float
    ) -> None:
        project = await training.project_of(session, row)
        namespace = self.trusted.jobs_in(row.organisation, project.team)
        rank = {"pod": namespace, "node": "", "boot_id": "", "gpus": gpus, "state": "STAGING"}
        row.cluster, row.ranks = self.cluster, [rank] * len(nodes)
        line = f"mirrored; {counted(len(nodes), 'pod')} in namespace {namespace} of cluster {self.cluster}"
        if row.status == "PENDING":
            await self.steps.say(session, row, now, line)
        else:
            await self.steps.enter(session, row, now, "PENDING", line)
        row.waiting_for, row.updated_at = "waits for Kubernetes to make its pods", now
        training.note_change(session, row)

    async def look(self, rows: Sequence[TrainingJobRow], now: float) -> None:
        is_due = now - self._strays_at >= _STRAYS_SECONDS
        self._made &= {row.id for row in rows}
        if not rows and not is_due:
            return
        try:
            async with self.api.connected() as connection:
                for row, seen in await self._seen(connection, rows):
                    with surviving(row.id):
                        await self._advance(connection, row, seen, now)
                if is_due:
                    await self._remove_strays(connection)
                    self._strays_at = now
        except ClusterUnavailableError as error:
            self._warn(error)
        else:
            self._problem = ""

    async def stop(self, row: TrainingJobRow) -> None:
        async with self.api.connected() as connection:
            await connection.delete(f"{_jobs(_namespace(row))}/{name_of(row.id)}")

    def _warn(self, error: ClusterUnavailableError) -> None:
        if self._problem != str(error):
            logger.warning("%s; jobs there stay as they are until it answers", error)
        self._problem = str(error)

    # --- one turn ---

    async def _seen(
        self, connection: ApiConnection, rows: Sequence[TrainingJobRow]
    ) -> list[tuple[TrainingJobRow, _Listed]]:
        """Each row with what its namespace has. Listed after the rows were read: a pod that a row names has existed."""
        by_namespace: dict[str, list[TrainingJobRow]] = defaultdict(list)
        for row in rows:
            by_namespace[_namespace(row)].append(row)
        found: list[tuple[TrainingJobRow, _Listed]] = []
        for namespace, own in by_namespace.items():
            selector = f"{JOB_LABEL} in ({','.join(row.id for row in own)})"
            jobs = await connection.listed(KubernetesJob, _jobs(namespace), selector)
            pods: dict[str, list[Pod]] = defaultdict(list)
            for pod in await connection.listed(Pod, _pods(namespace), selector):
                pods[pod.metadata.labels[JOB_LABEL]].append(pod)
            seen = _Listed({job.metadata.labels[JOB_LABEL]: job for job in jobs}, pods)
            found += [(row, seen) for row in own]
        return found

    async def _advance(self, connection: ApiConnection, row: TrainingJobRow, seen: _Listed, now: float) -> None:
        job, pods = seen.jobs.get(row.id), seen.pods.get(row.id, [])
        try:
            if row.ending_at is not None:
                await self._end(row, job)
            elif row.status == "PENDING":
                await self._make(connection, row, job)
                await self._deploy(row, job, pods, now)
                return
            await self._report(row, job, pods)
            await self._let_go(connection, row, pods)
        except ClusterUnavailableError as error:
            self._warn(error)
            if row.status == "PENDING":
                await self._wait(row, str(error), now)

    async def _make(self, connection: ApiConnection, row: TrainingJobRow, job: KubernetesJob | None) -> None:
        """Create the objects of a job that are not there."""
        if row.id in self._made and job is not None:
            return
        try:
            described = await self.describer.described(row, _namespace(row))
            path = _jobs(described.namespace)
            made = job.metadata.uid if job is not None else await connection.create(path, manifests.job_of(described))
            uid = made or await connection.uid_of(f"{path}/{name_of(row.id)}")  # of a Job that another process made
            core = f"/api/v1/namespaces/{described.namespace}"
            await connection.create(f"{core}/services", manifests.service_of(described, uid))
            if described.login is not None:
                secret = manifests.secret_of(described, described.login, uid)
                await connection.create(f"{core}/secrets", secret)
        except BdnError as error:
            if error.transient:
                raise
            async with self.database.write() as session:
                if (fresh := await training.lock(session, row.id)) is not None:
                    await self.steps.fail(session, fresh, self.database.now(), failure_of(error))
        else:
            self._made.add(row.id)

    async def _deploy(self, row: TrainingJobRow, job: KubernetesJob | None, pods: Sequence[Pod], now: float) -> None:
        """The step of a PENDING job: all its pods are on nodes, or one of them, or the Job itself, has failed."""
        chosen = [pod_for(pods, number, "") for number in range(len(row.ranks))]
        ended = [
            report_of(row.id, number, pod, is_ending=False) for number, pod in enumerate(chosen) if is_settled(pod)
        ]
        errors = [Failure(one.error.code, one.error.message) for one in ended if one.state == "ENDED" and one.error]
        if job is not None and (failed := job.status.condition("Failed")) is not None:
            errors.append(Failure("NODE_LOST", f"Kubernetes gave up the job: {failed.message or failed.reason}"))
        if not errors and (reason := waits_for(job, pods, len(row.ranks))) is not None:
            await self._wait(row, reason, now)
            return
        async with self.database.write() as session:
            fresh = await training.lock(session, row.id)
            if fresh is None or fresh.status != "PENDING" or fresh.ending_at is not None:
                return
            if errors:
                await self.steps.fail(session, fresh, now, errors[0])
                return
            fresh.ranks = [
                {**rank, "node": pod.spec.node_name, "boot_id": pod.metadata.uid}
                for rank, pod in zip(fresh.ranks, filter(None, chosen), strict=True)
            ]
            names = ", ".join(rank["node"] for rank in fresh.ranks)
            line = f"staging on {counted(len(fresh.ranks), 'node')} of cluster {self.cluster}: {names}"
            await self.steps.enter(session, fresh, now, "DEPLOYING", line)
            training.note_change(session, fresh)

    async def _wait(self, row: TrainingJobRow, reason: str, now: float) -> None:
        if row.waiting_for == reason:
            return
        async with self.database.write() as session:
            fresh = await training.lock(session, row.id, has_request=False)
            if fresh is not None and fresh.status == "PENDING" and fresh.ending_at is None:
                fresh.waiting_for, fresh.updated_at = reason, now

    async def _end(self, row: TrainingJobRow, job: KubernetesJob | None) -> None:
        if job is not None and not job.metadata.is_deleted:
            await self.stop(row)

    async def _report(self, row: TrainingJobRow, job: KubernetesJob | None, pods: Sequence[Pod]) -> None:
        """Record the ranks. Those that ended by themselves first: then Kubernetes deletes the other pods of their Job."""
        chosen = {
            number: pod_for(pods, number, rank["boot_id"])
            for number, rank in enumerate(row.ranks)
            if rank["state"] not in OVER
        }
        is_ending, staged = row.ending_at is not None, await self._staged(row)
        settled = [number for number, pod in chosen.items() if is_settled(pod)]
        for numbers in (settled, [number for number in chosen if number not in settled]):
            if numbers:
                reports = [
                    report_of(row.id, number, chosen[number], is_ending=is_ending).model_copy(update=staged.get(number))
                    for number in numbers
                ]
                await self.runs.record_ranks(self.cluster, None, reports)
                is_ending = is_ending or any(one.state == "LOST" or one.exit_code or one.error for one in reports)
        # A failure that no container has may end all ranks of the row at once, and no later turn would see it.
        if is_ending and any(pod is not None and not has_ended(pod) for pod in chosen.values()):
            await self._end(row, job)

    async def _staged(self, row: TrainingJobRow) -> dict[int, dict[str, int | None]]:
        """The bytes of ranks whose volumes are being staged, from the heartbeats of the agents on their nodes."""
        ranks = {
            number: rank for number, rank in enumerate(row.ranks) if rank["state"] == "STAGING" and rank["boot_id"]
        }
        if row.status != "DEPLOYING" or not ranks:
            return {}
        async with self.database.read() as session:
            sources = await training.mirrored(session, str(row.mirror_id))
            found = await agents.stages_on(session, self.cluster, {rank["node"] for rank in ranks.values()})
        staged: dict[int, dict[str, int | None]] = {}
        for number, rank in ranks.items():
            # The driver names the pod in the job of each of its stages (``node_agent/csi/target.py``).
            own = [stage for stage in found.get(rank["node"], ()) if f"@{rank['boot_id']}." in stage["job"]]
            totals = [stage["bytes_total"] for stage in own]
            total = total_of(totals) if len(own) == len(sources) else None
            staged[number] = {"bytes_done": sum(stage["bytes_done"] for stage in own), "bytes_total": total}
        return staged

    async def _let_go(self, connection: ApiConnection, row: TrainingJobRow, pods: Sequence[Pod]) -> None:
        """Let the pods of a RUNNING job start its commands."""
        going = [
            pod
            for number, want in enumerate(wants_of(row))
            if want == "go" and (pod := pod_for(pods, number, row.ranks[number]["boot_id"])) is not None
        ]
        places = asyncio.Semaphore(_AT_ONCE)

        async def let_go(pod: Pod) -> None:
            async with places:
                path = f"{_pods(_namespace(row))}/{pod.metadata.name}"
                await connection.annotate(path, pod.metadata.uid, {WANT: "go"})

        async with asyncio.TaskGroup() as group:
            for pod in going:
                if pod.metadata.annotations.get(WANT) != "go":
                    group.create_task(let_go(pod))

    async def _remove_strays(self, connection: ApiConnection) -> None:
        """Delete Jobs whose training jobs are over for the mirror: given up, or made while they were stopped."""
        selector = f"{OWNER_LABEL}={await database_id(self.database)}"
        for namespace in self.trusted.job_namespaces:
            for job in await connection.listed(KubernetesJob, _jobs(namespace), selector):
                if job.is_finished or job.metadata.is_deleted:
                    continue
                async with self.database.read() as session:
                    row = await training.read(session, job.metadata.labels.get(JOB_LABEL, ""), has_request=False)
                if row is None or row.status not in ACTIVE:
                    logger.warning("deleting Job %s/%s: its training job is over", namespace, job.metadata.name)
                    await connection.delete(f"{_jobs(namespace)}/{job.metadata.name}")


def _namespace(row: TrainingJobRow) -> str:
    return str(row.ranks[0]["pod"])


def _jobs(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"
