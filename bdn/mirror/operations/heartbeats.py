"""Agents and clusters, from heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from bdn.mirror.agents.members import ALIVE_SECONDS, INTERVAL_SECONDS, Roll, is_alive
from bdn.mirror.db import agents
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import AgentRow, OperationRow
from bdn.mirror.events import Events
from bdn.mirror.operations.operations import EVICTION, PREFETCH, Operations
from bdn.mirror.operations.prefetches import Prefetches
from bdn.mirror.operations.verifications import VerificationService
from bdn.mirror.waiting import Watch, agent_topic
from bdn.wire.agent_schema import AgentDocument, Cluster, Command, Heartbeat, HeartbeatReply, Report
from bdn.wire.grants import GrantSigner
from bdn.wire.operation_schema import EvictCommand
from bdn.wire.shapes import Items, moment
from bdn.wire.stage_schema import TierUse

_LOOK_AGAIN_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Membership:
    """The service behind ``/agents`` and ``/clusters``."""

    database: Database
    roll: Roll
    operations: Operations
    prefetches: Prefetches
    verifications: VerificationService
    events: Events
    signer: GrantSigner
    watch: Watch
    clock: Callable[[], float]

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Take an agent's state and reports; answer when there is something for it, or when its waiting time is over."""
        await self.roll.note(heartbeat)
        await self.events.record(heartbeat.cluster, heartbeat.node, heartbeat.events)
        for report in heartbeat.reports:
            await self._answer(heartbeat, report)
        reply, _ = await self.watch.look_until(
            agent_topic(heartbeat.cluster, heartbeat.node),
            partial(self._look, heartbeat),
            lambda seen: seen[1],
            heartbeat.wait_seconds,
            _LOOK_AGAIN_SECONDS,
        )
        return reply

    async def _look(self, heartbeat: Heartbeat) -> tuple[HeartbeatReply, bool]:
        """The answer as it is now, and whether it tells the agent to do something, or of other members."""
        view = await self.roll.view(heartbeat.cluster)
        are_known = heartbeat.epoch == view.epoch
        commands = [] if heartbeat.leaving else await self._commands(heartbeat)
        reply = HeartbeatReply(
            members=None if are_known else view.members,
            epoch=view.epoch,
            pending=commands,
            public_keys=[self.signer.public_key],
            interval_seconds=INTERVAL_SECONDS,
        )
        are_others = heartbeat.epoch is not None and not are_known
        return reply, bool(heartbeat.leaving or commands or are_others)

    async def _answer(self, heartbeat: Heartbeat, report: Report) -> None:
        result = report.evict or report.prefetch or report.verify
        await self.operations.answer(
            report.id,
            None if result is None else result.model_dump(mode="json"),
            report.error,
            cluster=heartbeat.cluster,
            node=heartbeat.node,
            is_running=report.running,
        )

    async def _commands(self, heartbeat: Heartbeat) -> list[Command]:
        """What the agent is asked and does not know yet."""
        cluster, node = heartbeat.cluster, heartbeat.node
        running = {report.id for report in heartbeat.reports if report.running}
        return [
            await self._command(row, cluster, node) for row in await self.operations.asked_of(cluster, node, running)
        ]

    async def _command(self, row: OperationRow, cluster: str, node: str) -> Command:
        if row.kind == EVICTION.name:
            return Command(id=row.id, evict=EvictCommand.model_validate(row.command))
        if row.kind == PREFETCH.name:
            return Command(id=row.id, prefetch=self.prefetches.command(row))
        return Command(id=row.id, verify=await self.verifications.command(row, cluster, node))

    async def agents(self) -> Items[AgentDocument]:
        """Every agent."""
        return Items[AgentDocument](items=[_agent(row, self.clock()) for row in await self._rows()])

    async def clusters(self) -> Items[Cluster]:
        """Every cluster, with the space of its living agents added up."""
        now = self.clock()
        by_cluster: dict[str, list[AgentDocument]] = {}
        for row in await self._rows():
            by_cluster.setdefault(row.cluster, []).append(_agent(row, now))
        async with self.database.read() as session:
            epochs = await agents.epochs(session)
        return Items[Cluster](
            items=[
                Cluster(
                    cluster=name,
                    epoch=epochs.get(name, 0),
                    agents=len(members),
                    agents_alive=sum(member.alive for member in members),
                    tiers=_sum_tiers([member for member in members if member.alive]),
                )
                for name, members in by_cluster.items()
            ]
        )

    async def _rows(self) -> list[AgentRow]:
        async with self.database.read() as session:
            return await agents.all_agents(session)


def _agent(row: AgentRow, now: float) -> AgentDocument:
    return AgentDocument(
        node=row.node,
        cluster=row.cluster,
        roles=row.roles,
        version=row.version,
        advertise=row.advertise,
        tiers={name: TierUse.model_validate(use) for name, use in row.tiers.items()},
        last_heartbeat=moment(row.last_heartbeat),
        alive=is_alive(row, now),
        disputed=row.disputed_at is not None and now - row.disputed_at < ALIVE_SECONDS,
        manifests=len(row.holdings),
    )


def _sum_tiers(members: list[AgentDocument]) -> dict[str, TierUse]:
    total: dict[str, TierUse] = {}
    for member in members:
        for name, use in member.tiers.items():
            sofar = total.get(name, TierUse(budget=0, committed=0, reserved=0, leased=0))
            total[name] = TierUse(
                budget=sofar.budget + use.budget,
                committed=sofar.committed + use.committed,
                reserved=sofar.reserved + use.reserved,
                leased=sofar.leased + use.leased,
                pressed=sofar.pressed + use.pressed,
            )
    return total
