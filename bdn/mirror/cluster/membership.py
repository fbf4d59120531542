"""Agents and clusters, from heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from bdn.mirror.database import Database
from bdn.mirror.eviction.evictions import Evictions, agent_topic
from bdn.mirror.repository import agents
from bdn.mirror.tables import AgentRow
from bdn.mirror.watch import Watch
from bdn.wire.agent_schema import Agent, Agents, Cluster, Clusters, Heartbeat, HeartbeatReply, Member
from bdn.wire.grants import GrantSigner
from bdn.wire.moments import moment
from bdn.wire.stage_schema import TierUse

INTERVAL_SECONDS: Final = 10.0
ALIVE_SECONDS: Final = 45.0  # longer than an interval and the longest wait together
_LOOK_AGAIN_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Membership:
    """The service behind ``/agents`` and ``/clusters``."""

    database: Database
    evictions: Evictions
    signer: GrantSigner
    watch: Watch

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Take an agent's state and reports; answer when there is a command for it, or when its waiting time is over."""
        epoch, members = await self._remember(heartbeat)
        for report in heartbeat.reports:
            await self.evictions.take_report(heartbeat.cluster, heartbeat.node, report)
        deadline = time.monotonic() + heartbeat.wait_seconds
        commands = await self.evictions.commands_for(heartbeat.cluster, heartbeat.node)
        while not commands and not self.watch.stopping and (left := deadline - time.monotonic()) > 0:
            topic = agent_topic(heartbeat.cluster, heartbeat.node)
            await self.watch.changed(topic, min(left, _LOOK_AGAIN_SECONDS))
            commands = await self.evictions.commands_for(heartbeat.cluster, heartbeat.node)
        return HeartbeatReply(
            members=members,
            epoch=epoch,
            commands=commands,
            public_keys=[self.signer.public_key],
            interval_seconds=INTERVAL_SECONDS,
        )

    async def _remember(self, heartbeat: Heartbeat) -> tuple[int, list[Member]]:
        now = time.time()
        columns = heartbeat.model_dump(include={"boot_id", "roles", "advertise", "version", "tiers"})
        if heartbeat.holdings is not None:
            columns["holdings"] = [holding.model_dump() for holding in heartbeat.holdings]
        async with self.database.write() as session:
            cluster = await agents.change_cluster(session, heartbeat.cluster)
            await agents.upsert(session, heartbeat.cluster, heartbeat.node, last_heartbeat=now, **columns)
            alive = await agents.alive_in(session, heartbeat.cluster, now - ALIVE_SECONDS)
            members = [Member(node=row.node, advertise=row.advertise, roles=row.roles) for row in alive]
            names = [member.model_dump() for member in members]
            if cluster.members != names:
                cluster.members = names
                cluster.epoch += 1
        return cluster.epoch, members

    async def agents(self) -> Agents:
        """Every agent."""
        return Agents(items=[_agent(row, time.time()) for row in await self._rows()])

    async def clusters(self) -> Clusters:
        """Every cluster, with the space of its living agents added up."""
        now = time.time()
        by_cluster: dict[str, list[Agent]] = {}
        for row in await self._rows():
            by_cluster.setdefault(row.cluster, []).append(_agent(row, now))
        async with self.database.read() as session:
            epochs = await agents.epochs(session)
        return Clusters(
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


def _agent(row: AgentRow, now: float) -> Agent:
    return Agent(
        node=row.node,
        cluster=row.cluster,
        roles=row.roles,
        version=row.version,
        advertise=row.advertise,
        tiers={name: TierUse.model_validate(use) for name, use in row.tiers.items()},
        last_heartbeat=moment(row.last_heartbeat),
        alive=now - row.last_heartbeat < ALIVE_SECONDS,
        manifests=len(row.holdings),
    )


def _sum_tiers(members: list[Agent]) -> dict[str, TierUse]:
    total: dict[str, TierUse] = {}
    for member in members:
        for name, use in member.tiers.items():
            sofar = total.get(name, TierUse(budget=0, committed=0, reserved=0, leased=0))
            total[name] = TierUse(
                budget=sofar.budget + use.budget,
                committed=sofar.committed + use.committed,
                reserved=sofar.reserved + use.reserved,
                leased=sofar.leased + use.leased,
            )
    return total
