"""The runner of agents with the role ``job``: nodes and what they have free, and nodes that are lost.

Agents are commanded by their heartbeats, and report with them (``runs``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bdn.core.training.placement import Demand, Node
from bdn.core.training.states import OVER, SILENT_SECONDS
from bdn.core.units import counted
from bdn.mirror.db import training
from bdn.mirror.db.agents import Name
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.tables import TrainingJobRow
from bdn.mirror.db.training import JobAgent, is_pod
from bdn.mirror.training.runners import surviving
from bdn.mirror.training.steps import Steps

_GAP_SECONDS: Final = 15.0


@dataclass
class Agents:
    """Nodes are not judged as silent before this process has looked for a minute without a gap: see ``_judges``."""

    database: Database
    steps: Steps
    _running_since: float | None = None
    _ran_at: float = 0.0

    async def nodes(self, session: ReadSession, rows: Sequence[TrainingJobRow], now: float) -> list[Node]:
        """The nodes, with what the ranks of these jobs take of them."""
        agents = await training.job_agents(session, now)
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
                if rank["state"] not in OVER and not is_pod(rank) and (node := nodes.get(name)) is not None:
                    nodes[name] = taken(node, Demand(1, "", rank["gpus"]))
        return sorted(nodes.values(), key=lambda node: (node.cluster, node.name))

    async def start(
        self, session: WriteSession, row: TrainingJobRow, nodes: Sequence[Node], gpus: int, now: float
    ) -> None:
        agents = await training.job_agents(session, now)
        placed = [agents[node.cluster, node.name] for node in nodes]
        row.cluster = nodes[0].cluster
        row.ranks = [
            {"node": agent.node, "boot_id": agent.boot_id, "gpus": gpus, "state": "STAGING"} for agent in placed
        ]
        names = ", ".join(node.name for node in nodes)
        line = f"mirrored; staging on {counted(len(placed), 'node')} of cluster {row.cluster}: {names}"
        await self.steps.enter(session, row, now, "DEPLOYING", line)
        training.note_change(session, row)

    async def look(self, rows: Sequence[TrainingJobRow], now: float) -> None:
        """Record the ranks whose nodes are lost."""
        if not self._judges(now):
            return
        async with self.database.read() as session:
            agents = await training.job_agents(session, now) if rows else {}
        for job in [row.id for row in rows if _lost(row, agents, now)]:
            with surviving(job):
                await self._lose(job, now)

    async def _lose(self, job: str, now: float) -> None:
        async with self.database.write() as session:
            row = await training.lock(session, job)
            lost = _lost(row, await training.job_agents(session, now), now) if row is not None else []
            if row is not None and lost:
                row.ranks = [
                    {**rank, "state": "LOST"} if number in lost else rank for number, rank in enumerate(row.ranks)
                ]
                await self.steps.take(session, row, now)

    async def stop(self, row: TrainingJobRow) -> None:
        """Nothing: the row itself is the command, which the job's agents read with their next heartbeats."""

    def _judges(self, now: float) -> bool:
        """Whether silence is the nodes'.

        After an outage of the mirror, the database or this process no node has a recent heartbeat. If all of them
        counted as lost, every job would fail.
        """
        if self._running_since is None or now - self._ran_at > _GAP_SECONDS:
            self._running_since = now
        self._ran_at = now
        return now - self._running_since >= SILENT_SECONDS

    def note_turn(self, began: float, ended: float) -> None:
        """A turn of the controller that took longer than half of a silence was an outage rather than many jobs."""
        if ended - began < SILENT_SECONDS / 2:
            self._ran_at = ended

    def note_outage(self) -> None:
        self._running_since = None


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


def taken(node: Node, demand: Demand) -> Node:
    if demand.gpus:
        return replace(node, gpus_used=node.gpus_used + demand.gpus)
    return replace(node, slots_used=node.slots_used + 1)


def reserved(node: Node, demand: Demand, cluster: str) -> Node:
    """A job that waits is not overtaken by smaller ones that would take its nodes one by one."""
    if node.cluster != cluster or not node.suits(demand):
        return node
    return replace(node, gpus_used=node.gpus) if demand.gpus else replace(node, slots_used=node.slots)
