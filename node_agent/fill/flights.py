"""At most one fill per file on this node, whoever waits for it; and one trip for files that come together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import DiskFailedError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.eviction_schema import Tier
from node_agent.background_tasks import BackgroundTasks, to_the_end
from node_agent.fill.order import FileReport

Start = Callable[["Trip"], Coroutine[object, object, None]]


@dataclass(eq=False)
class Trip:
    """A fill in progress. It belongs to nobody: its leader may leave, and it goes on while somebody waits."""

    leader: FileReport
    flights: dict[Digest, Flight] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    task: asyncio.Task[None] | None = None

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        """Tell everybody. The bytes were fetched for the leader; the others find them on this node."""
        flight = self.flights[file]
        flight.done += size
        for listener in flight.listeners:
            listener(file, tier if listener is self.leader else "node", size)

    @property
    def traffic(self) -> TrafficClass:
        """Whom it is for: the most urgent of those who wait for it now."""
        waiting = (traffic for flight in self.flights.values() for traffic in flight.listeners.values())
        return min(waiting, default=TrafficClass.STAGE)

    @property
    def is_over(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.task is None or self.task.done()

    @property
    def has_landed(self) -> bool:
        """Whether it ended well."""
        return self.is_over and self.error is None and self.task is not None and not self.task.cancelled()

    @property
    def is_abandoned(self) -> bool:
        """Whether it goes on and nobody waits for any of its files."""
        return not self.is_over and not any(flight.listeners for flight in self.flights.values())


@dataclass(eq=False)
class Flight:
    """One file of a trip, and who waits for it."""

    trip: Trip
    listeners: dict[FileReport, TrafficClass] = field(default_factory=dict)
    done: int = 0


class Flights:
    """Fills in progress by file. Its background outlives the stages, so that no fill dies with the stage that began it."""

    def __init__(self, background: BackgroundTasks) -> None:
        self._background = background
        self._flights: dict[Digest, Flight] = {}

    async def join(
        self,
        files: Collection[Digest],
        start: Start,
        report: FileReport,
        restart: Callable[[Digest], None],
        traffic: TrafficClass = TrafficClass.STAGE,
    ) -> None:
        """Wait until these files are whole, filling on one trip those that nobody fills.

        Cancelling leaves their flights; the last one who leaves a trip ends it, and waits until it has ended.

        Args:
            files: the files, which can be filled together.
            start: makes the fill of a trip; its files are those that nobody fills, or that whoever did has failed to fill.
            report: is told of progress, as a callable of its own.
            restart: is told that the progress reported so far of a file is void, because another trip begins.
            traffic: whom it is for.

        Raises:
            BdnError: our own fill failed, or the disk did, whosesoever fill it was.
        """
        waiting = list(dict.fromkeys(files))
        boarded: dict[Digest, Flight] = {}
        try:
            while waiting:
                self._take_off([file for file in waiting if file not in self._flights], start, report)
                for file in waiting:
                    self._board(file, boarded, report, traffic)
                tasks = {flight.trip.task for flight in boarded.values() if flight.trip.task}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                waiting = self._still_waiting(waiting, boarded, report, restart)
        finally:
            await _leave(boarded.values(), report)

    def stop_trying(self) -> None:
        """The agent ends: no fill shall go through its retries any more."""
        for flight in self._flights.values():
            flight.trip.stop.set()

    def _take_off(self, files: Sequence[Digest], start: Start, report: FileReport) -> None:
        if not files:
            return
        trip = Trip(report)
        trip.flights = {file: Flight(trip) for file in files}
        self._flights.update(trip.flights)
        trip.task = self._background.start(_fly(trip, start), f"fill {files[0]}")
        # Not in a finally of the task: a task that is canceled before its first step never gets there.
        trip.task.add_done_callback(lambda _: self._forget(files))

    def _forget(self, files: Iterable[Digest]) -> None:
        for file in files:
            del self._flights[file]

    def _board(self, file: Digest, boarded: dict[Digest, Flight], report: FileReport, traffic: TrafficClass) -> None:
        if file in boarded:
            return
        flight = boarded[file] = self._flights[file]
        if flight.done and report is not flight.trip.leader:
            report(file, "node", flight.done)
        flight.listeners[report] = traffic

    @staticmethod
    def _still_waiting(
        waiting: Sequence[Digest],
        boarded: dict[Digest, Flight],
        report: FileReport,
        restart: Callable[[Digest], None],
    ) -> list[Digest]:
        """The files that are not whole yet; raises the error of a trip that was ours, or that ended for all."""
        left: list[Digest] = []
        for file in waiting:
            trip = boarded[file].trip
            if trip.is_over:
                del boarded[file]
            if not trip.has_landed:
                left.append(file)
            if trip.error and (trip.leader is report or isinstance(trip.error, DiskFailedError)):
                raise trip.error
            if trip.is_over and not trip.has_landed:
                # A led with a grant that expired, or left as the last one just before we came; B has a right of its own.
                restart(file)
        return left


async def _leave(flights: Iterable[Flight], report: FileReport) -> None:
    trips: dict[Trip, None] = {}
    for flight in flights:
        flight.listeners.pop(report, None)
        trips[flight.trip] = None
    abandoned = [trip.task for trip in trips if trip.is_abandoned and trip.task]
    for trip in trips:
        if trip.is_abandoned and trip.task:
            trip.stop.set()  # first, so that the threads do not go through their retries
            trip.task.cancel()
    if abandoned:
        await to_the_end(_ended(abandoned))


async def _fly(trip: Trip, start: Start) -> None:
    try:
        await start(trip)
    except Exception as error:  # noqa: BLE001 - it is raised again, by everybody who waits
        trip.error = error


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
