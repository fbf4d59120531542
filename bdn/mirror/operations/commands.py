"""What an operator asks of agents and of the mirror itself: recorded, told, answered by each, and then settled.

recorded, RUNNING: pending at the mirror and at agents that live; those that do not are unreachable
→ each who answers is pending no more, and adds what it did
→ nobody is pending, or nobody who is will answer any more: settled; who has not answered is unreachable
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Final, Generic, Protocol

from pydantic import BaseModel

from bdn.core.errors import NotFoundError
from bdn.mirror.agents.addressees import MIRROR, Narrowed, agents_asked, name_of
from bdn.mirror.agents.liveness import is_alive
from bdn.mirror.db import agents, asked
from bdn.mirror.db.asked import Asked
from bdn.mirror.db.database import Database, ReadSession
from bdn.mirror.single_flight import SharedRead
from bdn.mirror.watch import Watch, agent_topic
from bdn.wire.errors import ErrorBody

_LOOK_AGAIN_SECONDS: Final = 0.5


class AskedRequest(Narrowed, Protocol):
    """What the operator sent."""

    def model_dump(self) -> dict[str, object]:
        """As it is recorded."""
        ...


class Asking(Generic[Asked]):
    """All of one kind.

    Args:
        table: where they are recorded.
        kind: how an operator calls one.
        given_up: who of those that one is pending at will not answer it any more.
        verdict: the status of one that everybody has answered without an error.
    """

    def __init__(
        self,
        table: type[Asked],
        kind: str,
        database: Database,
        watch: Watch,
        clock: Callable[[], float],
        *,
        given_up: Callable[[ReadSession, Asked], Awaitable[Collection[str]]],
        verdict: Callable[[Asked], str],
    ) -> None:
        self._table = table
        self._kind = kind
        self._database = database
        self._watch = watch
        self._clock = clock
        self._given_up = given_up
        self._verdict = verdict
        self._running = SharedRead(self._look_for_running, _LOOK_AGAIN_SECONDS)  # every open heartbeat asks for them

    async def begin(
        self, asked_id: str, organisation: str, request: AskedRequest, command: BaseModel, *, is_for_mirror: bool
    ) -> None:
        """Record it, and tell the agents that it is for. Raises ``NotFoundError`` when it names some and there are none."""
        async with self._database.read() as session:
            addressees = agents_asked(request, await agents.all_agents(session))
        now = self._clock()
        alive = [agent for agent in addressees if is_alive(agent, now)]
        row = self._table(
            id=asked_id,
            organisation=organisation,
            status="RUNNING",
            created_at=now,
            request=request.model_dump(),
            command=command.model_dump(),
            items=[],
            pending=[*([MIRROR] if is_for_mirror else []), *map(name_of, alive)],
            unreachable=[name_of(agent) for agent in addressees if agent not in alive],
        )
        async with self._database.write() as session:
            await asked.insert(session, row)
        self._running.forget()
        for agent in alive:
            self._watch.notify(agent_topic(agent.cluster, agent.node))

    async def pending_at(self, cluster: str, node: str) -> list[Asked]:
        """What an agent has not answered yet, oldest first."""
        return [row for row in await self._running.get() if f"{cluster}/{node}" in row.pending]

    async def answer(
        self, asked_id: str, cluster: str, node: str, add: Callable[[Asked], None], error: ErrorBody | None
    ) -> None:
        """An agent has done what it did, and ``add`` writes that down; an answer that nobody waits for is passed over."""
        name = f"{cluster}/{node}"
        async with self._database.write() as session:
            row = await asked.change(session, self._table, asked_id)
            if row is None or name not in row.pending:
                return
            add(row)
            row.pending = [other for other in row.pending if other != name]
            if error is not None:
                row.error = error.model_dump()
        self._running.forget()
        await self.settle(asked_id, row.organisation)

    async def fail_here(self, asked_id: str, error: ErrorBody) -> None:
        """The mirror's own part has failed."""
        async with self._database.write() as session:
            row = await asked.change(session, self._table, asked_id)
            if row is not None:
                row.error = error.model_dump()
                row.pending = [name for name in row.pending if name != MIRROR]
                row.status = row.status if row.status == "RUNNING" else self._outcome(row)

    async def get(self, asked_id: str, organisation: str, wait_seconds: float) -> Asked:
        """Once it is settled or when the time is over; ``NotFoundError`` also when it is another organisation's."""
        return await self._watch.look_until(
            asked_id,
            partial(self.settle, asked_id, organisation),
            lambda row: row.status != "RUNNING",
            wait_seconds,
            _LOOK_AGAIN_SECONDS,
        )

    async def settle(self, asked_id: str, organisation: str) -> Asked:
        """As it is now: over when everybody has answered who still may."""
        async with self._database.read() as session:
            row = await asked.get(session, self._table, asked_id)
            if row is None or row.organisation != organisation:
                raise NotFoundError(f"{self._kind} {asked_id}")
            if row.status != "RUNNING" or set(row.pending) - set(await self._given_up(session, row)):
                return row
        async with self._database.write() as session:
            row = await asked.change(session, self._table, asked_id) or row
            if row.status == "RUNNING":
                row.unreachable = [*row.unreachable, *row.pending]
                row.pending = []
                row.status = self._outcome(row)
                row.completed_at = self._clock()
        self._watch.notify(asked_id)
        return row

    def _outcome(self, row: Asked) -> str:
        return "FAILED" if row.error is not None or row.unreachable else self._verdict(row)

    async def _look_for_running(self) -> list[Asked]:
        async with self._database.read() as session:
            return await asked.running(session, self._table)
