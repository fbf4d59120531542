"""What somebody asks of agents and of the mirror's store: recorded, told, answered by each, and then over.

recorded, RUNNING: a part for each who is asked, PENDING for agents that live, UNREACHABLE for the others
→ each answers: its part is RUNNING as long as it is at work, then DONE or FAILED
→ no part is open, or those that are will not be answered any more, and are UNREACHABLE: the operation is over
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pydantic import BaseModel

from bdn.core.errors import NotFoundError
from bdn.mirror.db import operations
from bdn.mirror.db.agents import ALIVE_SECONDS, heard_at, is_alive
from bdn.mirror.db.caches import REMOVAL
from bdn.mirror.db.database import Database
from bdn.mirror.db.operations import ANY, MIRROR, Who
from bdn.mirror.db.tables import AgentRow, OperationPartRow, OperationRow
from bdn.mirror.db.waiting import SharedRead, SharedReads, agent_topic
from bdn.wire.shapes import ErrorBody, moment

_LOOK_AGAIN_SECONDS: Final = 0.5


@dataclass(frozen=True)
class OperationState:
    """An operation as it is now."""

    row: OperationRow
    parts: list[OperationPartRow]

    def all(self, key: str) -> list[Any]:
        """What is listed under this key in the results of all parts, the mirror's first."""
        return [item for part in self.parts for item in part.result.get(key, [])]

    def document(self) -> dict[str, Any]:
        """What the documents of all kinds have in common."""
        return {
            "id": self.row.id,
            "status": self.row.status,
            "created_at": moment(self.row.created_at),
            "completed_at": moment(self.row.completed_at) if self.row.completed_at else None,
            "request": self.row.request,
            "unreachable": [_name(part) for part in self.parts if part.state == "UNREACHABLE"],
            "error": next((part.error for part in self.parts if part.error is not None), None),
        }


@dataclass(frozen=True)
class OperationKind:
    """What is different.

    Args:
        name: how people call one; its beginning is that of the ids.
        verdict: the status of one that everybody has answered without an error.
        answer_seconds: after so long since it was asked, nobody carries it out any more.
        silent_seconds: after so long since an agent was heard of, it will not answer; a mirror's own part is waited for.
    """

    name: str
    verdict: Callable[[OperationState], str] = lambda _: "DONE"
    answer_seconds: float | None = None
    silent_seconds: float | None = None

    def new_id(self) -> str:
        """An id for one that is to begin."""
        return f"{self.name[:3]}_{secrets.token_hex(12)}"

    def is_late(self, row: OperationRow, now: float) -> bool:
        """Nobody carries out today what was given up yesterday."""
        return self.answer_seconds is not None and now - row.created_at > self.answer_seconds


EVICTION: Final = OperationKind(
    "eviction",
    lambda operation: "REFUSED" if any(item["refused"] for item in operation.all("items")) else "DONE",
    answer_seconds=45.0,
)
VERIFICATION: Final = OperationKind(
    "verification",
    lambda operation: "DAMAGED" if any(item["outcome"] != "repaired" for item in operation.all("items")) else "DONE",
    silent_seconds=ALIVE_SECONDS,  # reading takes as long as it takes: no limit so long as the agent is heard of
)
PREFETCH: Final = OperationKind(
    "prefetch",
    lambda _: "READY",
    silent_seconds=120.0,  # an agent that restarts is back by then, and goes on
)
COLLECTION: Final = OperationKind("collection")
CACHE_REMOVAL: Final = OperationKind(REMOVAL)  # for ever: a cluster that cannot be reached does it when it is back
_KINDS: Final = {kind.name: kind for kind in (EVICTION, VERIFICATION, PREFETCH, COLLECTION, CACHE_REMOVAL)}


class Operations:
    """Keeps them in the database. A process that was down judges nobody by his silence before it has listened as long."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watch = database.watch
        self._clock = database.now
        self._began_at = self._clock()
        self._open = SharedRead(self._look_for_open, _LOOK_AGAIN_SECONDS)  # every open heartbeat asks for them
        self._settled = SharedReads[str, bool](_LOOK_AGAIN_SECONDS)
        self._answered: defaultdict[str, set[Who]] = defaultdict(set)  # here since ``_open`` was read, or before

    async def begin(
        self,
        kind: OperationKind,
        operation_id: str,
        request: BaseModel,
        command: dict[str, Any],
        *,
        organisation: str | None = None,
        asked: Sequence[AgentRow] = (),
        mirror: bool = False,
    ) -> None:
        """Record it with a part for each who is asked, and tell the agents. ``command`` is what is to be remembered."""
        now = self._clock()
        row = OperationRow(
            id=operation_id,
            kind=kind.name,
            organisation=organisation,
            status="RUNNING",
            created_at=now,
            completed_at=None,
            request=request.model_dump(),
            command=command,
        )
        states = {(agent.cluster, agent.node): "PENDING" if is_alive(agent, now) else "UNREACHABLE" for agent in asked}
        if mirror:
            states["", MIRROR] = "PENDING"
        parts = [
            OperationPartRow(operation=operation_id, cluster=cluster, node=node, state=state, result={}, error=None)
            for (cluster, node), state in states.items()
        ]
        async with self._database.write() as session:
            await operations.insert(session, row, parts)
        self._open.forget()
        for agent in asked:
            self._watch.notify(agent_topic(agent.cluster, agent.node))

    async def asked_of(
        self, cluster: str, node: str, running: Collection[str], volume: str | None = None
    ) -> list[OperationRow]:
        """What an agent has not answered and still may, but for those that it says to be at work on, oldest first.

        What is for any agent of its cluster is for those that have its volume. What is given to an agent is read anew: another process may
        have taken its answer since the last look.
        """

        def unanswered(is_open: Mapping[Who, Sequence[OperationRow]]) -> list[OperationRow]:
            own = self._unanswered((cluster, node), running, is_open)
            of_any = self._unanswered((cluster, ANY), running, is_open)
            return own + [row for row in of_any if volume is not None and row.command["volume_id"] == volume]

        return unanswered(await self._open.get()) and unanswered(await self._open.get(anew=True))

    def _unanswered(
        self, who: Who, running: Collection[str], is_open: Mapping[Who, Sequence[OperationRow]]
    ) -> list[OperationRow]:
        now = self._clock()
        return [
            row
            for row in is_open.get(who, ())
            if row.id not in running
            and who not in self._answered.get(row.id, ())
            and not _KINDS[row.kind].is_late(row, now)
        ]

    async def asked(self) -> Collection[Who]:
        """All agents that have something to answer, perhaps what they are at work on."""
        return (await self._open.get()).keys()

    async def answer(
        self,
        operation_id: str,
        result: dict[str, Any] | None,
        error: ErrorBody | None = None,
        *,
        cluster: str = "",
        node: str = MIRROR,
        is_running: bool = False,
    ) -> None:
        """What an agent, or the mirror, has done so far; None adds nothing. An answer that nobody waits for is passed over.

        It costs one row, whatever others have answered; the last one costs a look at all of them.
        """
        values: dict[str, Any] = {"state": "RUNNING" if is_running else "FAILED" if error else "DONE"}
        if result is not None:
            values["result"] = result
        if error is not None:
            values["error"] = error.model_dump()
        async with self._database.write() as session:
            is_taken = await operations.set_part(session, operation_id, cluster, node, **values)
        if is_taken and not is_running:
            self._answered[operation_id].add((cluster, node))
            # After the commit: of two that are the last at the same time, neither sees the other's answer before.
            async with self._database.read() as session:
                is_open = await operations.is_open(session, operation_id)
            if not is_open:
                await self._settle(operation_id)

    async def get(
        self, kind: OperationKind, operation_id: str, organisation: str | None = None, wait_seconds: float = 0
    ) -> OperationState:
        """Once it is over or when the time is; ``NotFoundError`` also when it is another organisation's."""
        async with self._database.read() as session:
            row = await operations.get(session, operation_id)
        if row is None or (row.kind, row.organisation) != (kind.name, organisation):
            raise NotFoundError(f"{kind.name} {operation_id}")
        look = self._settled.of(operation_id, partial(self._settle, operation_id), self._watch.topic(operation_id))
        first = partial(look.get, anew=True)
        await self._watch.look_until(operation_id, look.get, lambda is_over: is_over, wait_seconds, first=first)
        async with self._database.read() as session:
            row = await operations.get(session, operation_id)
            assert row is not None  # noqa: S101 - nothing deletes them
            return OperationState(row, await operations.parts_of(session, operation_id))

    async def _settle(self, operation_id: str) -> bool:
        """Whether it is over: everybody has answered who still may."""
        async with self._database.read() as session:
            row = await operations.get(session, operation_id)
            is_open = await operations.is_open(session, operation_id)
        if row is None or row.status != "RUNNING":
            return True
        given_up = await self._given_up(row) if is_open else []
        if is_open and not given_up:
            return False
        async with self._database.write() as session:
            await operations.give_up(session, operation_id, given_up)
            if is_over := not await operations.is_open(session, operation_id):
                status = _status(OperationState(row, await operations.parts_of(session, operation_id)))
                await operations.finish(session, operation_id, status, self._clock())
        self._open.forget()
        return is_over

    async def _given_up(self, row: OperationRow) -> list[Who]:
        """Who will not answer any more."""
        kind, now = _KINDS[row.kind], self._clock()
        silence = kind.silent_seconds
        is_late = kind.is_late(row, now)
        if not is_late and (silence is None or now - self._began_at < silence):
            return []
        async with self._database.read() as session:
            waited_for = await operations.waited_for(session, row.id)
            heard = {} if is_late else await heard_at(session)
        if is_late:
            return waited_for
        return [who for who in waited_for if who[0] and now - heard.get(who, 0.0) >= (silence or 0.0)]

    async def _look_for_open(self) -> dict[Who, list[OperationRow]]:
        async with self._database.read() as session:
            found = await operations.open_of_agents(session)
        still = {row.id for rows in found.values() for row in rows}
        for operation_id in self._answered.keys() - still:
            del self._answered[operation_id]
        return found


def part_of(operation_id: str, node: str) -> str:
    """The node of the part that an agent of this name answers."""
    return ANY if operation_id.startswith(f"{CACHE_REMOVAL.name[:3]}_") else node


def _status(operation: OperationState) -> str:
    """How it ended."""
    if any(part.error is not None or part.state != "DONE" for part in operation.parts):
        return "FAILED"
    return _KINDS[operation.row.kind].verdict(operation)


def _name(part: OperationPartRow) -> str:
    return f"{part.cluster}/{part.node}" if part.cluster else part.node
