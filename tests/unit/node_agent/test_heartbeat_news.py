"""What the mirror hears of a node's holdings and of what came of its commands, and when."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from bdn.core.errors import InternalError
from bdn.wire.heartbeat_schema import Command, Heartbeat, HeartbeatReply, Report
from bdn.wire.mirror_schema import Holding
from bdn.wire.operation_schema import EvictCommand, EvictReport
from node_agent.background_tasks import BackgroundTasks
from node_agent.fetch.peers import Members
from node_agent.journal import Journal
from node_agent.mirror_link.commands import CommandInbox
from node_agent.mirror_link.heartbeats import ChangeSignal, Heartbeats
from node_agent.trust import Trust
from tests.fakes.recorded_holdings import RecordedHoldings
from tests.support.network.loops import run_hurried

ME = Heartbeat(node="n", cluster="c", boot_id="b", roles=["node"], advertise=None, version="1", tiers={})
EVICT = Command(id="evict", evict=EvictCommand(id="evict", all=True))


class Mirror:
    """Takes up changes of what it has, keeps requests open until there is a command, and notes what it has at a result.

    Who names other members than there are is answered soon, and at once where it waits for nothing.
    """

    def __init__(self) -> None:
        self.recorded = RecordedHoldings()
        self.commands: list[Command] = []
        self.is_commanded = asyncio.Event()
        self.held_at_result: set[str] | None = None
        self.has_result = asyncio.Event()
        self.has_holdings = asyncio.Event()
        self.told: list[int] = []  # how many changes each heartbeat told
        self.failures = 0  # so many that tell something are refused first
        self.epoch = 0  # of the members

    def command(self, command: Command) -> None:
        self.commands.append(command)
        self.is_commanded.set()

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        if self.failures and not heartbeat.wait_seconds:
            self.failures -= 1
            raise InternalError("it is down")
        change = heartbeat.changes
        if change is not None:
            self.told.append(len(change.held) + len(change.gone))
        digest = self.recorded.record(change)
        if self.recorded.held:
            self.has_holdings.set()
        for report in heartbeat.reports:
            if not report.running:
                self.commands = [command for command in self.commands if command.id != report.id]
                self.held_at_result = set(self.recorded.held)
                self.has_result.set()
        told = {report.id for report in heartbeat.reports}
        if heartbeat.wait_seconds and heartbeat.epoch != self.epoch:
            await asyncio.sleep(0.1)
        elif heartbeat.wait_seconds and all(command.id in told for command in self.commands):
            self.is_commanded.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat.wait_seconds):
                    await self.is_commanded.wait()
        pending = [command for command in self.commands if command.id not in told]
        return HeartbeatReply(
            members=None if heartbeat.epoch == self.epoch else [],
            epoch=self.epoch,
            pending=pending,
            public_keys=[],
            interval_seconds=5,
            holdings_digest=digest,
        )


class ScriptedMirror:
    """Answers requests that may stay open as the script says: a letter each, ``.`` for an answer and ``x`` for none."""

    def __init__(self, script: str) -> None:
        self.script = list(script)
        self.asked_at: list[float] = []
        self.is_over = asyncio.Event()

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        if not heartbeat.wait_seconds:
            raise InternalError("news are not scripted")
        if not self.script:
            self.is_over.set()
            await asyncio.Event().wait()
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.script.pop(0) == "x":
            raise InternalError("it is down")
        return HeartbeatReply(members=None, epoch=0, public_keys=[], interval_seconds=5, holdings_digest="")


class Cache:
    """What a node holds."""

    def __init__(self) -> None:
        self.held: list[Holding] = []

    async def tiers(self) -> dict[str, Any]:
        return {}

    async def all(self) -> list[Holding]:
        return list(self.held)


class Node:
    """Heartbeats of a node that evicts in a tenth of a second."""

    def __init__(
        self, mirror: Mirror | ScriptedMirror, folder: Path, background: BackgroundTasks, *, awaits: bool = False
    ) -> None:
        self.cache, self.news = Cache(), ChangeSignal()
        if awaits:
            asyncio.get_running_loop().call_later(7, self.news.awaits_command.set)
        journal = Journal(folder / "journal", lambda: 0.0, lambda _: None)
        journal.open()
        given: Any = {
            "trust": Trust(folder / "keys", lambda: 0.0, self.news.tell_now),
            "members": Members("n", folder / "members"),
            "holdings": self.cache,
            "inbox": CommandInbox(background, {"evict": self._evict}, self.news.wake),
            "news": self.news,
            "journal": journal,
            "state": dict,
        }
        client: Any = mirror
        Heartbeats(ME, client, **given).start(background)

    def hold(self, *numbers: int) -> None:
        self.cache.held = [Holding(manifest=f"b3:{number:064x}", bytes=5) for number in numbers]
        self.news.tell()

    async def _evict(self, command: EvictCommand, tell: Any) -> None:
        await asyncio.sleep(0.1)
        self.hold()
        tell(Report(id=command.id, evict=EvictReport(items=[])))


def test_who_hears_that_an_eviction_is_over_has_heard_that_nothing_is_left(tmp_path: Path) -> None:
    """The eviction comes while a change is not told yet, and is over before a request that was kept open is answered."""

    async def run() -> set[str] | None:
        mirror = Mirror()
        async with BackgroundTasks() as background:
            node = Node(mirror, tmp_path, background)
            await asyncio.sleep(2)
            node.hold(1)
            await asyncio.sleep(0.1)  # the mirror has heard of it, and news rests
            assert mirror.recorded.held
            node.hold(1, 2)
            mirror.command(EVICT)
            await mirror.has_result.wait()
        return mirror.held_at_result

    assert run_hurried(run()) == set()


def test_a_command_is_heard_soon_though_another_answer_has_brought_other_members_first(tmp_path: Path) -> None:
    async def run() -> float:
        mirror = Mirror()
        mirror.epoch = 1
        async with BackgroundTasks() as background:
            Node(mirror, tmp_path, background)
            await asyncio.sleep(2)
            mirror.command(EVICT)
            began = asyncio.get_running_loop().time()
            await mirror.has_result.wait()
        return asyncio.get_running_loop().time() - began

    assert run_hurried(run()) < 1


def test_what_changes_after_a_change_waits_and_is_told_together(tmp_path: Path) -> None:
    async def run() -> list[int]:
        mirror = Mirror()
        async with BackgroundTasks() as background:
            node = Node(mirror, tmp_path, background)
            await asyncio.sleep(2)
            mirror.told.clear()
            for number in range(1, 5):
                node.hold(*range(number))
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
        return mirror.told

    assert run_hurried(run()) == [1, 3]


def test_agent_that_awaits_a_command__reports_the_next_change_without_a_pause(tmp_path: Path) -> None:
    async def run() -> float:
        mirror = Mirror()
        loop = asyncio.get_running_loop()
        async with BackgroundTasks() as background:
            node = Node(mirror, tmp_path, background)
            await asyncio.sleep(2)
            node.hold(1)
            await asyncio.sleep(0.1)  # the report of the first change is followed by a pause
            mirror.has_holdings.clear()
            node.news.awaits_command.set()
            node.hold(1, 2)
            await mirror.has_holdings.wait()
            return loop.time()

    assert run_hurried(run()) < 2.2


def test_what_a_mirror_that_fails_was_told_is_told_again_while_another_request_is_kept_open(tmp_path: Path) -> None:
    async def run() -> float:
        mirror = Mirror()
        loop = asyncio.get_running_loop()
        async with BackgroundTasks() as background:
            node = Node(mirror, tmp_path, background)
            await asyncio.sleep(2)
            mirror.failures = 2
            node.hold(1)
            await mirror.has_holdings.wait()
            return loop.time()

    assert 4 < run_hurried(run()) < 6  # after pauses of one second and of two; the open request ends at ten


def asked_at(script: str, folder: Path, *, awaits: bool = False) -> list[float]:
    """When an agent sends heartbeats to a mirror that answers so; from the seventh second on it may await a command."""

    async def run() -> list[float]:
        mirror = ScriptedMirror(script)
        async with BackgroundTasks() as background:
            Node(mirror, folder, background, awaits=awaits)
            await mirror.is_over.wait()
        return mirror.asked_at

    return run_hurried(run())


def test_a_mirror_that_is_down_is_asked_less_and_less_often_until_it_answers(tmp_path: Path) -> None:
    assert asked_at("xxxxxxx.xx.", tmp_path) == [0, 1, 3, 7, 15, 25, 35, 45, 50, 51, 53]


def test_a_mirror_that_keeps_no_request_open_is_asked_as_often_as_it_says(tmp_path: Path) -> None:
    assert asked_at("....", tmp_path) == [0, 5, 10, 15]


def test_agent_that_awaits_a_command__sends_the_next_heartbeat_without_a_pause(tmp_path: Path) -> None:
    times = asked_at(".....", tmp_path, awaits=True)

    assert times[:3] == [0, 5, 7]
    assert times[-1] < 7.5
