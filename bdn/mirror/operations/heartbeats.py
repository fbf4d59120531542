"""Heartbeats of agents: members and epochs of clusters, and commands to agents.

A member joins, leaves or falls silent; each change starts a new epoch of its cluster.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from bdn.core.errors import BdnError, InUseError, InvalidRequestError, NotFoundError
from bdn.mirror.db import agents
from bdn.mirror.db.agents import Heard, Name
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.events import Events
from bdn.mirror.db.operations import ANY
from bdn.mirror.db.tables import AgentRow, ClusterRow
from bdn.mirror.db.waiting import SharedRead, SharedReads, agent_topic
from bdn.mirror.operations.operations import part_of
from bdn.mirror.operations.requests import OperationRequests
from bdn.wire.heartbeat_schema import (
    AgentDocument,
    Cluster,
    Command,
    Heartbeat,
    HeartbeatReply,
    MemberDocument,
    Report,
)
from bdn.wire.run_schema import is_run
from bdn.wire.shapes import Items, added

logger = logging.getLogger(__name__)
LOOK_SECONDS: Final = 0.5
INTERVAL_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 15.0  # without heartbeats from any agent: the mirror, not the agents, was unreachable
_SAID: Final = {"boot_id", "roles", "advertise", "version", "tiers", "unsynced_bytes", "caches", "capacity"}
_PROGRESS: Final = "stages"
_TOGETHER_SECONDS: Final = 1.0  # between batched writes of heartbeats, and between polls for other processes' commands

_Members = tuple[int, list[MemberDocument]]  # the epoch and its members, in the order of their names


class NodeRuns(Protocol):
    """Commands to agents about runs of training jobs, and agents' reports of these."""

    async def record(self, cluster: str, node: str, reports: Sequence[Report]) -> None: ...

    async def commands(self, cluster: str, node: str, running: Collection[str]) -> list[Command]:
        """Without the commands whose ids are in ``running``."""
        ...

    async def asked(self) -> Collection[Name]: ...


@dataclass
class Membership:
    """The service behind ``/agents`` and ``/clusters``.

    Writes the times of unchanged heartbeats together, once a second, and with them the progress of stages.

    After an outage of the mirror or database, no agent has a recent heartbeat. If all of them counted as silent, the
    first agents to return would find themselves alone in their cluster and each read everything from the mirror. So no
    agent counts as silent before heartbeats have arrived for ``ALIVE_SECONDS`` without a gap.
    """

    database: Database
    requests: OperationRequests
    runs: NodeRuns
    events: Events
    clock: Callable[[], float]
    _epochs: SharedReads[str, int] = field(default_factory=lambda: SharedReads(LOOK_SECONDS))  # by cluster
    _members: SharedReads[str, _Members] = field(default_factory=lambda: SharedReads(0.0))  # by cluster
    _heard: dict[Name, Heard] = field(default_factory=dict)  # of the last second
    _waiting: dict[int, Heartbeat] = field(default_factory=dict)  # held open

    def __post_init__(self) -> None:
        self._hearing_since = self._heard_at = self.clock()

    async def keep(self) -> None:
        """Run until canceled: write heartbeats, and wake held ones for which another process has commands."""
        while True:
            await asyncio.sleep(_TOGETHER_SECONDS)
            with suppress(BdnError):  # each request reads and raises it
                await self._write_heard()
                await self._wake()

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Record an agent's state and reports. Replies once there is news for the agent, or its waiting time is over."""
        digest = await self._record(heartbeat)
        await self.events.record(heartbeat.cluster, heartbeat.node, heartbeat.events)
        runs = [report for report in heartbeat.reports if is_run(report.id)]
        if runs:
            await self.runs.record(heartbeat.cluster, heartbeat.node, runs)
        for report in heartbeat.reports:
            if is_run(report.id):
                continue
            result = report.evict or report.prefetch or report.verify or report.remove_cache
            await self.requests.operations.answer(
                report.id,
                None if result is None else result.model_dump(mode="json"),
                report.error,
                cluster=heartbeat.cluster,
                node=part_of(report.id, heartbeat.node),
                is_running=report.running,
            )
        self._waiting[id(heartbeat)] = heartbeat
        try:
            epoch, commands, _ = await self.database.watch.look_until(
                agent_topic(heartbeat.cluster, heartbeat.node),
                partial(self._look, heartbeat),
                lambda seen: seen[-1],
                heartbeat.wait_seconds,
                again_seconds=heartbeat.wait_seconds,
            )
        finally:
            del self._waiting[id(heartbeat)]
        members: list[MemberDocument] | None = None
        if heartbeat.epoch != epoch:
            read = self._members.of(heartbeat.cluster, partial(self._read_members, heartbeat.cluster))
            epoch, members = await read.get()
        return HeartbeatReply(
            members=members,
            epoch=epoch,
            pending=commands,
            public_keys=self.requests.signer.public_keys,
            interval_seconds=INTERVAL_SECONDS,
            holdings_digest=digest,
        )

    async def _look(self, heartbeat: Heartbeat) -> tuple[int, list[Command], bool]:
        """Returns epoch, commands, and whether to reply now: the agent leaves, has commands, or lacks the epoch."""
        epoch = await self._epoch(heartbeat.cluster).get()
        running = {report.id for report in heartbeat.reports if report.running}
        commands: list[Command] = []
        if not heartbeat.leaving:
            commands = await self.requests.commands(heartbeat.cluster, heartbeat.node, running, heartbeat.volume_id)
            commands += await self.runs.commands(heartbeat.cluster, heartbeat.node, running)
        are_others = heartbeat.epoch not in (None, epoch)
        return epoch, commands, bool(heartbeat.leaving or commands or are_others)

    async def _record(self, heartbeat: Heartbeat) -> str:
        """Write the heartbeat. Returns the digest of the agent's recorded holdings.

        Of a held heartbeat without other news only the time and the progress of stages are written, together with others
        of its second: a thousand nodes that stage are then a hundred small updates in one transaction a second.
        """
        now, agent = self.clock(), (heartbeat.cluster, heartbeat.node)
        said = heartbeat.model_dump(include=_SAID)
        stages = heartbeat.model_dump(include={_PROGRESS})[_PROGRESS]
        dated = {**said, _PROGRESS: stages, "state_at": heartbeat.state_at}
        async with self.database.read() as session:
            row = await agents.who_is(session, *agent)
        if row is not None and row.joined_at is not None and not heartbeat.leaving and _who(row) == _who(heartbeat):
            is_new = heartbeat.changes is not None or any(getattr(row, name) != value for name, value in said.items())
            if not is_new and heartbeat.wait_seconds >= _TOGETHER_SECONDS:
                progress = stages if stages != (row.stages or []) else None
                self._heard[agent] = Heard(now, heartbeat.boot_id, heartbeat.state_at, progress)
                return row.holdings_digest or ""
            digest = await self._note_known(heartbeat, dated, now)
        else:
            digest = await self._note_change(heartbeat, dated, now)
        self._written(now)
        return digest

    def _written(self, at: float) -> None:
        """Heartbeats until this time are in the database."""
        if at - self._heard_at > _SILENCE_SECONDS:
            self._hearing_since = at
        self._heard_at = max(self._heard_at, at)

    async def _write_heard(self) -> None:
        heard, self._heard = self._heard, {}
        if heard:
            try:
                async with self.database.write() as session:
                    await agents.note_heard(session, heard)
            except BaseException:
                self._heard = heard | self._heard
                raise
            self._written(max(one.at for one in heard.values()))

    async def _wake(self) -> None:
        """Wake held heartbeats that may have news: writes of another process do not wake them."""
        asked = {*await self.requests.operations.asked(), *await self.runs.asked()}
        clusters = {heartbeat.cluster for heartbeat in self._waiting.values()}
        epochs = {cluster: await self._epoch(cluster).get() for cluster in clusters}
        for heartbeat in tuple(self._waiting.values()):
            name = heartbeat.cluster, heartbeat.node
            if (
                name in asked
                or (heartbeat.cluster, ANY) in asked
                or heartbeat.epoch not in (None, epochs.get(heartbeat.cluster))
            ):
                self.database.watch.notify(agent_topic(*name))

    async def _note_known(self, heartbeat: Heartbeat, said: dict[str, Any], now: float) -> str:
        """Write what a member says, without locking its cluster."""
        async with self.database.write() as session:
            row = await agents.who_is(session, heartbeat.cluster, heartbeat.node)
            if row is not None and row.joined_at is not None:
                await agents.upsert(session, heartbeat.cluster, heartbeat.node, **said, last_heartbeat=now)
                return await _hold(session, heartbeat, row.holdings_digest or "")
        return await self._note_change(heartbeat, said, now)

    async def _note_change(self, heartbeat: Heartbeat, said: dict[str, Any], now: float) -> str:
        """Write what an agent says that joins, leaves or becomes another, with its cluster's row locked."""
        async with self.database.write() as session:
            cluster = await agents.change_cluster(session, heartbeat.cluster)
            row = await agents.who_is(session, heartbeat.cluster, heartbeat.node)
            before = None if row is None or row.joined_at is None else _member(row)
            after = None if heartbeat.leaving else _member(heartbeat)
            joined_at = None if after is None else (row and row.joined_at) or now
            left_at = now if heartbeat.leaving else None
            columns = {"joined_at": joined_at, "left_at": left_at, **_dispute(row, heartbeat, now)}
            await agents.upsert(session, heartbeat.cluster, heartbeat.node, **said, **columns, last_heartbeat=now)
            if before != after:
                _advance(cluster, now)
            digest = await _hold(session, heartbeat, (row and row.holdings_digest) or "")
        self._epoch(heartbeat.cluster).forget()
        return digest

    def _epoch(self, cluster: str) -> SharedRead[int]:
        return self._epochs.of(cluster, partial(self._read_epoch, cluster))

    async def _read_epoch(self, cluster: str) -> int:
        """The epoch, without the members that fell silent."""
        now = self.clock()
        may_judge = now - self._hearing_since >= agents.ALIVE_SECONDS and now - self._heard_at <= _SILENCE_SECONDS
        async with self.database.read() as session:
            epoch = await agents.epoch_of(session, cluster)
            must_drop = may_judge and await agents.is_one_silent(session, cluster, now - agents.ALIVE_SECONDS)
        return await self._drop_silent(cluster, now) if must_drop else epoch

    async def _read_members(self, cluster: str) -> _Members:
        async with self.database.read() as session:
            epoch = await agents.epoch_of(session, cluster)
            return epoch, [_member(row) for row in await agents.members_of(session, cluster)]

    async def _drop_silent(self, name: str, now: float) -> int:
        async with self.database.write() as session:
            cluster = await agents.change_cluster(session, name)
            dropped = await agents.drop_silent(session, name, now - agents.ALIVE_SECONDS)
            if dropped:
                _advance(cluster, now)
        if dropped:
            logger.warning(
                "cluster %s: removed members without a heartbeat for %.0f s: %s",
                name,
                agents.ALIVE_SECONDS,
                ", ".join(dropped),
            )
        return cluster.epoch

    async def agents(self, after: Name | None, limit: int) -> tuple[list[AgentDocument], Name | None]:
        """A page of agents in the order of their names, and the cursor of the next page."""
        async with self.database.read() as session:
            rows = await agents.page(session, after, limit + 1)
        now, shown = self.clock(), rows[:limit]
        last = (shown[-1].cluster, shown[-1].node) if len(shown) < len(rows) else None
        return [_agent(row, now) for row in shown], last

    async def remove(self, cluster: str | None, node: str) -> AgentDocument:
        """Remove an agent that is not alive; if it returns, it is a new agent.

        Raises:
            NotFoundError: no agent has this name.
            InvalidRequestError: agents in several clusters have this name.
            InUseError: the agent is alive, and would rejoin with its next heartbeat.
        """
        async with self.database.read() as session:
            found = await agents.named(session, cluster, node)
        if not found:
            raise NotFoundError(f"agent {node}" if cluster is None else f"agent {cluster}/{node}")
        if len(found) > 1:
            names = ", ".join(row.cluster for row in found)
            raise InvalidRequestError(f"clusters {names} each have an agent {node}; name its cluster")
        [row] = found
        now = self.clock()
        async with self.database.write() as session:
            its_cluster = await agents.change_cluster(session, row.cluster)
            row = await agents.who_is(session, row.cluster, node) or row
            if agents.is_alive(row, now):
                raise InUseError(f"agent {row.cluster}/{node}", ("itself: it sends heartbeats; stop it first",))
            await agents.remove(session, row.cluster, node)
            if row.joined_at is not None:
                _advance(its_cluster, now)
        self._epoch(row.cluster).forget()
        logger.info("agent removed", extra={"cluster": row.cluster, "node": node})
        return _agent(row, now)

    async def clusters(self) -> Items[Cluster]:
        """All clusters, with the space of their living agents added up."""
        now = self.clock()
        by_cluster: dict[str, list[AgentDocument]] = {}
        async with self.database.read() as session:
            rows = await agents.named(session, None, None)
            epochs = await agents.epochs(session)
        for row in rows:
            by_cluster.setdefault(row.cluster, []).append(_agent(row, now))
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


async def _hold(session: WriteSession, heartbeat: Heartbeat, digest: str) -> str:
    """Record a change of the agent's holdings, if any. Returns the digest of the recorded holdings."""
    change = heartbeat.changes
    return digest if change is None else await agents.hold(session, heartbeat.cluster, heartbeat.node, change)


def _advance(cluster: ClusterRow, now: float) -> None:
    """Not less than the current time, so that a new or restored database repeats no epoch."""
    cluster.epoch = max(cluster.epoch + 1, int(now))


def _who(one: AgentRow | Heartbeat) -> tuple[object, ...]:
    return one.boot_id, one.roles, one.advertise


def _member(one: AgentRow | Heartbeat) -> MemberDocument:
    return MemberDocument(node=one.node, advertise=one.advertise, roles=one.roles)


def _dispute(row: AgentRow | None, heartbeat: Heartbeat, now: float) -> dict[str, Any]:
    """Columns that distinguish two agents with one name from one that moved: a replaced agent sends no more heartbeats."""
    speaker = _speaker(heartbeat)
    if row is None or _speaker(row) == speaker:
        return {}
    changes: dict[str, Any] = {"replaced": _speaker(row), "replaced_at": now}
    if row.replaced == speaker and now - (row.replaced_at or 0.0) < agents.ALIVE_SECONDS:
        changes["disputed_at"] = now
        if row.disputed_at is None or now - row.disputed_at >= agents.ALIVE_SECONDS:
            logger.warning(
                "two agents have the name %s in cluster %s: at %s and at %s; set another BDN_AGENT_NODE for one of them",
                heartbeat.node,
                heartbeat.cluster,
                row.advertise,
                heartbeat.advertise,
            )
    return changes


def _speaker(one: AgentRow | Heartbeat) -> str:
    return f"{one.boot_id} {one.advertise}"


def _agent(row: AgentRow, now: float) -> AgentDocument:
    is_disputed = row.disputed_at is not None and now - row.disputed_at < agents.ALIVE_SECONDS
    states = {"alive": agents.is_alive(row, now), "disputed": is_disputed}
    recorded = {name: getattr(row, name) for name in AgentDocument.model_fields.keys() - states}
    return AgentDocument.model_validate(recorded | states)


def _sum_tiers(members: list[AgentDocument]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for member in members:
        for name, use in member.tiers.items():
            sizes = sums.setdefault(name, {})
            for size, count in use.model_dump(exclude={"problem"}).items():
                sizes[size] = added(sizes.get(size, 0), count)
    return sums
