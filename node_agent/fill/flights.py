"""At most one fill per file on this node, whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import DiskFailedError
from bdn.wire.eviction_schema import Tier
from node_agent.crew import Crew, to_the_end
from node_agent.fill.filler import Report

Start = Callable[[Report, threading.Event], Coroutine[object, object, None]]


@dataclass(eq=False)
class Flight:
    """A fill in progress. It belongs to nobody: its leader may leave, and it goes on while somebody waits."""

    stop: threading.Event = field(default_factory=threading.Event)
    listeners: set[Report] = field(default_factory=set)
    leader: Report | None = None
    done: int = 0
    error: Exception | None = None
    task: asyncio.Task[None] | None = None

    def report(self, tier: Tier, size: int) -> None:
        """Tell everybody. The bytes were fetched for the leader; the others find them on this node."""
        self.done += size
        for listener in self.listeners:
            listener(tier if listener is self.leader else "node", size)

    @property
    def is_over(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.task is None or self.task.done()


class Flights:
    """Fills in progress by file. Its crew outlives the stages, so that no fill dies with the stage that began it."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._flights: dict[Digest, Flight] = {}

    async def join(self, digest: Digest, start: Start, report: Report, restart: Callable[[], None]) -> None:
        """Wait until the file is whole, filling it if nobody does.

        Cancelling leaves the flight; the last one who leaves ends it, and waits until it has ended.

        Args:
            digest: the file.
            start: makes the fill; called when nobody fills this file, or when the one who did has failed.
            report: is told of progress, as a callable of its own.
            restart: is told that the progress reported so far is void, because another flight begins.

        Raises:
            BdnError: our own fill failed, or the disk did, whosesoever fill it was.
        """
        while True:
            flight = self._flights.get(digest)
            is_leader = flight is None
            if flight is None:
                flight = self._take_off(digest, start, report)
            await self._ride(flight, report)
            if flight.error is None and flight.task and not flight.task.cancelled():
                return
            if flight.error and (is_leader or isinstance(flight.error, DiskFailedError)):
                raise flight.error
            # A led with a grant that expired, or left as the last one just before we came; B has a right of its own.
            restart()

    def stop_trying(self) -> None:
        """The agent ends: no fill shall go through its retries any more."""
        for flight in self._flights.values():
            flight.stop.set()

    def _take_off(self, digest: Digest, start: Start, report: Report) -> Flight:
        flight = Flight(leader=report)
        self._flights[digest] = flight
        flight.task = self._crew.start(_fly(flight, start), f"fill {digest}")
        # Not in a finally of the task: a task that is canceled before its first step never gets there.
        flight.task.add_done_callback(lambda _: self._flights.pop(digest))
        return flight

    async def _ride(self, flight: Flight, report: Report) -> None:
        if flight.done and report is not flight.leader:
            report("node", flight.done)
        flight.listeners.add(report)
        try:
            if flight.task:
                await asyncio.wait([flight.task])
        finally:
            flight.listeners.discard(report)
            if not flight.listeners and flight.task and not flight.is_over:
                flight.stop.set()  # first, so that the threads do not go through their retries
                flight.task.cancel()
                await to_the_end(_ended(flight.task))


async def _fly(flight: Flight, start: Start) -> None:
    try:
        await start(flight.report, flight.stop)
    except Exception as error:  # noqa: BLE001 - it is raised again, by everybody who waits
        flight.error = error


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
