"""Operations on agents and the mirror's store: recorded, sent to each, answered by each, then over.

recorded, RUNNING: one part for each addressee, PENDING for living agents, UNREACHABLE for other agents
→ each answers: its part is RUNNING while it works, then DONE or FAILED
→ over: no part is open; parts that will not be answered any more are UNREACHABLE
"""

import secrets
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
    row: OperationRow
    parts: list[OperationPartRow]

    def all(self, key: str) -> list[Any]:
        """The items under this key in the results of all parts, the mirror's first."""
        return [item for part in self.parts for item in part.result.get(key, [])]

    def document(self) -> dict[str, Any]:
        """The fields that documents of all kinds have in common."""
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
    """The rules that differ between kinds of operations.

    Args:
        name: as users call it; its first letters begin the ids.
        verdict: the status if all parts ended without an error.
        answer_seconds: after this time since the request, no agent carries it out any more.
        silent_seconds: an agent without a heartbeat for this time will not answer. The mirror's own part has no such
            limit.
    """

    name: str
    verdict: Callable[[OperationState], str] = lambda _: "DONE"
    answer_seconds: float | None = None
    silent_seconds: float | None = None

    def new_id(self) -> str:
        return f"{self.name[:3]}_{secrets.token_hex(12)}"

    def is_late(self, row: OperationRow, now: float) -> bool:
        return self.answer_seconds is not None and now - row.created_at > self.answer_seconds


EVICTION: Final = OperationKind(
    "eviction",
    lambda operation: "REFUSED" if any(item["refused"] for item in operation.all("items")) else "DONE",
    answer_seconds=45.0,
)
VERIFICATION: Final = OperationKind(
    "verification",
    lambda operation: "DAMAGED" if any(item["outcome"] != "repaired" for item in operation.all("items")) else "DONE",
    silent_seconds=ALIVE_SECONDS,  # reading has no time limit while the agent sends heartbeats
)
PREFETCH: Final = OperationKind(
    "prefetch",
    lambda _: "READY",
    silent_seconds=120.0,  # an agent that restarts is back by then, and resumes
)
COLLECTION: Final = OperationKind("collection")
CACHE_REMOVAL: Final = OperationKind(REMOVAL)  # without limit: a cluster that cannot be reached does it when it is back
_KINDS: Final = {kind.name: kind for kind in (EVICTION, VERIFICATION, PREFETCH, COLLECTION, CACHE_REMOVAL)}


class Operations:
    """Stored in the database. A process counts no agent as silent before it has run for ``silent_seconds`` itself."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watch = database.watch
        self._clock = database.now
        self._began_at = self._clock()
        self._open = SharedRead(self._look_for_open, _LOOK_AGAIN_SECONDS)  # read for every held heartbeat
        self._open_now = SharedRead(self._look_for_open, 0.0)
        self._settled = SharedReads[str, bool](0.0)

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
        """Record the operation with a part for each addressee, and notify the agents. ``command`` is stored with it."""
        now, about = self._clock(), {"request": request.model_dump(), "command": command}
        states = {(agent.cluster, agent.node): "PENDING" if is_alive(agent, now) else "UNREACHABLE" for agent in asked}
        if mirror:
            states["", MIRROR] = "PENDING"
        async with self._database.write() as session:
            await operations.insert(session, operation_id, kind.name, states, now, organisation=organisation, **about)
        self._open.forget()
        for agent in asked:
            self._watch.notify(agent_topic(agent.cluster, agent.node))

    async def asked_of(
        self, cluster: str, node: str, running: Collection[str], volume: str | None = None
    ) -> list[OperationRow]:
        """The operations that an agent may still answer, without those in ``running``, oldest first.

        Operations for any agent of a cluster are for agents with their volume. The result is read again each time:
        another process may have recorded this agent's answer since the last read.
        """

        def unanswered(is_open: Mapping[Who, Sequence[OperationRow]]) -> list[OperationRow]:
            own = self._unanswered((cluster, node), running, is_open)
            of_any = self._unanswered((cluster, ANY), running, is_open)
            return own + [row for row in of_any if volume is not None and row.command["volume_id"] == volume]

        return unanswered(await self._open.get()) and unanswered(await self._open_now.get())

    def _unanswered(
        self, who: Who, running: Collection[str], is_open: Mapping[Who, Sequence[OperationRow]]
    ) -> list[OperationRow]:
        now = self._clock()
        return [row for row in is_open.get(who, ()) if row.id not in running and not _KINDS[row.kind].is_late(row, now)]

    async def asked(self) -> Collection[Who]:
        """All agents with open parts, including parts that they are working on."""
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
        """Record the progress or result of an agent or the mirror; None adds nothing. Drops an answer to a closed part.

        Writes one row, however many parts there are; the last answer also reads all parts.
        """
        values: dict[str, Any] = {"state": "RUNNING" if is_running else "FAILED" if error else "DONE"}
        if result is not None:
            values["result"] = result
        if error is not None:
            values["error"] = error.model_dump()
        async with self._database.write() as session:
            is_taken = await operations.set_part(session, operation_id, cluster, node, **values)
        if is_taken and not is_running:
            # After the commit: of two concurrent last answers, neither sees the other's before.
            async with self._database.read() as session:
                is_open = await operations.is_open(session, operation_id)
            if not is_open:
                await self._settle(operation_id)

    async def get(
        self, kind: OperationKind, operation_id: str, organisation: str | None = None, wait_seconds: float = 0
    ) -> OperationState:
        """Returns once it is over or the waiting time ends.

        ``NotFoundError`` also for another organisation's operation.
        """
        async with self._database.read() as session:
            row = await operations.get(session, operation_id)
        if row is None or (row.kind, row.organisation) != (kind.name, organisation):
            raise NotFoundError(f"{kind.name} {operation_id}")
        look = self._settled.of(operation_id, partial(self._settle, operation_id), self._watch.topic(operation_id))
        await self._watch.look_until(operation_id, look.get, lambda is_over: is_over, wait_seconds)
        async with self._database.read() as session:
            row = await operations.get(session, operation_id)
            assert row is not None  # noqa: S101 - operations are never deleted
            return OperationState(row, await operations.parts_of(session, operation_id))

    async def _settle(self, operation_id: str) -> bool:
        """Finish the operation if no part can be answered any more. Returns whether it is over."""
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
            return await operations.open_of_agents(session)


def part_of(operation_id: str, node: str) -> str:
    """The node of the part that an agent of this name answers: ``ANY`` for the removal of a cache."""
    return ANY if operation_id.startswith(f"{CACHE_REMOVAL.name[:3]}_") else node


def _status(operation: OperationState) -> str:
    if any(part.error is not None or part.state != "DONE" for part in operation.parts):
        return "FAILED"
    return _KINDS[operation.row.kind].verdict(operation)


def _name(part: OperationPartRow) -> str:
    return f"{part.cluster}/{part.node}" if part.cluster else part.node
