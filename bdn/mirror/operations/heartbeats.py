"""Agents and clusters, from heartbeats: who is a member, and what each agent is told.

A member joins, leaves or falls silent; each change is a new epoch of its cluster.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bdn.mirror.db import agents
from bdn.mirror.db.database import Database
from bdn.mirror.db.events import Events
from bdn.mirror.db.tables import AgentRow, ClusterRow
from bdn.mirror.operations.requests import OperationRequests
from bdn.mirror.waiting import SharedRead, Watch, agent_topic
from bdn.wire.heartbeat_schema import AgentDocument, Cluster, Command, Heartbeat, HeartbeatReply, MemberDocument
from bdn.wire.shapes import Items, moment

logger = logging.getLogger(__name__)
LOOK_SECONDS: Final = 0.5
INTERVAL_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 15.0  # in which nobody at all is heard of: it is us who cannot be reached
_LOOK_AGAIN_SECONDS: Final = 1.0

_Members = tuple[int, list[MemberDocument]]  # the epoch, and who is a member in it, in the order of their names


@dataclass
class Membership:
    """The service behind ``/agents`` and ``/clusters``. An agent that stays what it is costs one statement.

    A mirror or a database that was away for a minute has not heard of anybody. If that made everybody a stranger, the
    first agents to be back would be told that they are alone, and would each read everything from the mirror. So nobody is
    silent before heartbeats have been coming for ``ALIVE_SECONDS`` without a break.
    """

    database: Database
    requests: OperationRequests
    events: Events
    watch: Watch
    clock: Callable[[], float]
    _reads: dict[str, SharedRead[_Members]] = field(default_factory=dict)  # by cluster, for all who ask

    def __post_init__(self) -> None:
        self._hearing_since = self._heard_at = self.clock()

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Take an agent's state and reports; answer when there is something for it, or when its waiting time is over."""
        await self._note(heartbeat)
        await self.events.record(heartbeat.cluster, heartbeat.node, heartbeat.events)
        for report in heartbeat.reports:
            result = report.evict or report.prefetch or report.verify
            await self.requests.operations.answer(
                report.id,
                None if result is None else result.model_dump(mode="json"),
                report.error,
                cluster=heartbeat.cluster,
                node=heartbeat.node,
                is_running=report.running,
            )
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
        epoch, members = await self._members(heartbeat.cluster).get()
        are_known = heartbeat.epoch == epoch
        running = {report.id for report in heartbeat.reports if report.running}
        commands: list[Command] = []
        if not heartbeat.leaving:
            commands = await self.requests.commands(heartbeat.cluster, heartbeat.node, running)
        reply = HeartbeatReply(
            members=None if are_known else members,
            epoch=epoch,
            pending=commands,
            public_keys=self.requests.signer.public_keys,
            interval_seconds=INTERVAL_SECONDS,
        )
        are_others = heartbeat.epoch is not None and not are_known
        return reply, bool(heartbeat.leaving or commands or are_others)

    async def _note(self, heartbeat: Heartbeat) -> None:
        now = self.clock()
        columns = heartbeat.model_dump(include={"boot_id", "roles", "advertise", "version", "tiers"})
        if heartbeat.holdings is not None:
            columns["holdings"] = [holding.model_dump() for holding in heartbeat.holdings]
        columns["last_heartbeat"] = now
        if not await self._note_known(heartbeat, columns):
            await self._note_change(heartbeat, columns, now)
            self._members(heartbeat.cluster).forget()
        if now - self._heard_at > _SILENCE_SECONDS:
            self._hearing_since = now
        self._heard_at = max(self._heard_at, now)

    async def _note_known(self, heartbeat: Heartbeat, columns: dict[str, Any]) -> bool:
        """False when the cluster's row must be locked: something about its members may be another now."""
        if heartbeat.leaving:
            return False
        async with self.database.read() as session:
            row = await agents.who_is(session, heartbeat.cluster, heartbeat.node)
        if row is None or row.joined_at is None or _who(row) != _who(heartbeat):
            return False
        async with self.database.write() as session:
            # Meanwhile somebody may have found it silent; then it joins again.
            return await agents.note_heartbeat(session, heartbeat.cluster, heartbeat.node, **columns)

    async def _note_change(self, heartbeat: Heartbeat, columns: dict[str, Any], now: float) -> None:
        async with self.database.write() as session:
            cluster = await agents.change_cluster(session, heartbeat.cluster)
            row = await agents.who_is(session, heartbeat.cluster, heartbeat.node)
            before = None if row is None or row.joined_at is None else _member(row)
            after = None if heartbeat.leaving else _member(heartbeat)
            joined_at = None if after is None else (row and row.joined_at) or now
            columns |= {"joined_at": joined_at, **_dispute(row, heartbeat, now)}
            await agents.upsert(session, heartbeat.cluster, heartbeat.node, **columns)
            if before != after:
                _advance(cluster, now)

    def _members(self, cluster: str) -> SharedRead[_Members]:
        if cluster not in self._reads:
            self._reads[cluster] = SharedRead(partial(self._read_living, cluster), LOOK_SECONDS)
        return self._reads[cluster]

    async def _read_living(self, cluster: str) -> _Members:
        """Who has fallen silent is dropped first."""
        now = self.clock()
        epoch, rows = await self._read(cluster)
        may_judge = now - self._hearing_since >= agents.ALIVE_SECONDS and now - self._heard_at <= _SILENCE_SECONDS
        if may_judge and any(row.last_heartbeat < now - agents.ALIVE_SECONDS for row in rows):
            await self._drop_silent(cluster, now)
            epoch, rows = await self._read(cluster)
        return epoch, [_member(row) for row in rows]

    async def _read(self, cluster: str) -> tuple[int, list[AgentRow]]:
        async with self.database.read() as session:
            return await agents.epoch_of(session, cluster), await agents.members_of(session, cluster)

    async def _drop_silent(self, name: str, now: float) -> None:
        async with self.database.write() as session:
            cluster = await agents.change_cluster(session, name)
            dropped = await agents.drop_silent(session, name, now - agents.ALIVE_SECONDS)
            if dropped:
                _advance(cluster, now)
        if dropped:
            logger.warning("cluster %s: not heard of for %.0f s: %s", name, agents.ALIVE_SECONDS, ", ".join(dropped))

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
                Cluster.model_validate(
                    {
                        "cluster": name,
                        "epoch": epochs.get(name, 0),
                        "agents": len(members),
                        "agents_alive": sum(member.alive for member in members),
                        "tiers": _sum_tiers([member for member in members if member.alive]),
                    }
                )
                for name, members in by_cluster.items()
            ]
        )

    async def _rows(self) -> list[AgentRow]:
        async with self.database.read() as session:
            return await agents.all_agents(session)


def _advance(cluster: ClusterRow, now: float) -> None:
    """One more, and not less than the time: a database that is new, or was set back, repeats no epoch."""
    cluster.epoch = max(cluster.epoch + 1, int(now))


def _who(one: AgentRow | Heartbeat) -> tuple[object, ...]:
    return one.boot_id, one.roles, one.advertise


def _member(one: AgentRow | Heartbeat) -> MemberDocument:
    return MemberDocument(node=one.node, advertise=one.advertise, roles=one.roles)


def _dispute(row: AgentRow | None, heartbeat: Heartbeat, now: float) -> dict[str, Any]:
    """Columns that tell two agents with one name from one agent that moved: who was replaced does not speak again."""
    speaker = _speaker(heartbeat)
    if row is None or _speaker(row) == speaker:
        return {}
    changes: dict[str, Any] = {"replaced": _speaker(row), "replaced_at": now}
    if row.replaced == speaker and now - (row.replaced_at or 0.0) < agents.ALIVE_SECONDS:
        changes["disputed_at"] = now
        if row.disputed_at is None or now - row.disputed_at >= agents.ALIVE_SECONDS:
            logger.warning(
                "two agents call themselves %s in cluster %s: at %s and at %s; give one another BDN_AGENT_NODE",
                heartbeat.node,
                heartbeat.cluster,
                row.advertise,
                heartbeat.advertise,
            )
    return changes


def _speaker(one: AgentRow | Heartbeat) -> str:
    return f"{one.boot_id} {one.advertise}"


def _agent(row: AgentRow, now: float) -> AgentDocument:
    return AgentDocument.model_validate(
        {
            "node": row.node,
            "cluster": row.cluster,
            "roles": row.roles,
            "version": row.version,
            "advertise": row.advertise,
            "tiers": row.tiers,
            "last_heartbeat": moment(row.last_heartbeat),
            "alive": agents.is_alive(row, now),
            "disputed": row.disputed_at is not None and now - row.disputed_at < agents.ALIVE_SECONDS,
            "manifests": len(row.holdings),
        }
    )


def _sum_tiers(members: list[AgentDocument]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for member in members:
        for name, use in member.tiers.items():
            sizes = sums.setdefault(name, {})
            for size, count in use.model_dump(exclude={"problem"}).items():
                sizes[size] = sizes.get(size, 0) + count
    return sums
