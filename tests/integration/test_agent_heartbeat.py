"""What the mirror hears of an agent, and what it makes it do."""

# ruff: noqa: ASYNC110 - a test's loop serves no other clients

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bdn.core.errors import BdnError, GrantInvalidError, LimitExceededError
from bdn.wire.event_schema import NodeEvent
from bdn.wire.heartbeat_schema import Command, Heartbeat, HeartbeatReply, Report
from bdn.wire.mirror_schema import Holding
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.disk.cache_directory import boot_id
from node_agent.journal import Journal
from node_agent.mirror_link import heartbeats as heartbeat
from node_agent.mirror_link.commands import EvictionCommands
from node_agent.mirror_link.heartbeats import AgentHoldings
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise


class ListeningMirror(AgentMirror):
    """Lets a test wait until a heartbeat of some kind has come."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._beats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        reply = super().beat(heartbeat)
        self._loop.call_soon_threadsafe(self._beats.put_nowait, heartbeat)
        return reply

    async def heard(self, condition: Callable[[Heartbeat], bool]) -> Heartbeat:
        async with asyncio.timeout(30):
            while True:
                heartbeat = await self._beats.get()
                if condition(heartbeat):
                    return heartbeat

    async def answered(self, command_id: str) -> Report:
        """What the agent says when the command is over."""
        await self.heard(lambda _: bool(self.reports(command_id)))
        return self.reports(command_id)[0]


def held(heartbeat: Heartbeat) -> list[Holding]:
    """What it says of holdings: all, or what has changed."""
    return heartbeat.changes.held if heartbeat.changes else []


@pytest.fixture
async def mirror() -> AsyncIterator[ListeningMirror]:
    mirror = ListeningMirror()
    with mirror.running():
        yield mirror


@pytest.fixture
def rig(mirror: ListeningMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path)


async def test_the_first_heartbeat_says_who_the_agent_is_and_what_it_holds(mirror: ListeningMirror, rig: Rig) -> None:
    async with rig.agent(cluster="east", roles="node", cache_bytes=MIB) as agent:
        first = await mirror.heard(lambda _: True)

        assert (first.node, first.cluster, first.roles) == ("node-1", "east", ["node"])
        assert first.boot_id == boot_id()
        assert first.advertise == f"http://127.0.0.1:{agent.data_port}"
        assert first.changes is None  # the answer says what the mirror has already
        assert first.tiers["node"].budget == MIB


async def test_heartbeats_are_dated_in_the_order_of_their_states(mirror: ListeningMirror, rig: Rig) -> None:
    async with rig.agent() as agent:
        for _ in range(2):
            await agent.heartbeats.beat()
        dates = [beat.state_at or 0.0 for beat in list(mirror.heartbeats) if not beat.wait_seconds]  # one at a time
        assert dates == sorted(set(dates))
        assert dates[0] > 0


async def test_what_was_recorded_is_read_beside_the_event_loop(
    mirror: ListeningMirror, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []
    unreported = Journal.unreported

    def watched(journal: Journal) -> list[NodeEvent]:
        readers.append(threading.current_thread())
        return unreported(journal)

    monkeypatch.setattr(Journal, "unreported", watched)
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        assert readers
        assert threading.current_thread() not in readers  # its lock is held while a busy disk is waited for


async def test_what_a_mirror_refuses_as_too_large_is_told_in_smaller_pieces(
    mirror: ListeningMirror, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [mirror.publish({"f": noise(100, number)}) for number in range(3)]
    beat = ListeningMirror.beat

    def refuse(mirror: ListeningMirror, heartbeat: Heartbeat) -> HeartbeatReply:
        if len(held(heartbeat)) > 1:
            raise LimitExceededError("bytes of a request", 2, 1)
        return beat(mirror, heartbeat)

    async with rig.agent() as agent:
        for manifest in manifests:
            await staged(agent, mirror, manifest)
        while len(mirror.held["node-1"].held) < len(manifests):
            await mirror.heard(lambda beat: beat.changes is not None)
        monkeypatch.setattr(heartbeat, "_NEWS_PAUSE_SECONDS", 0)
        monkeypatch.setattr(ListeningMirror, "beat", refuse)
        del mirror.held["node-1"]  # so that all is told again
        for _ in range(2):  # the first answer says what the mirror has
            with suppress(BdnError):
                await agent.heartbeats.beat()
        while len(mirror.held["node-1"].held) < len(manifests):
            await mirror.heard(lambda beat: beat.changes is not None)


async def test_a_command_is_carried_out_and_reported(mirror: ListeningMirror, rig: Rig) -> None:
    one, two = mirror.publish({"f": noise(100, 1)}), mirror.publish({"f": noise(100, 2)})
    async with rig.agent() as agent:
        kept = await staged(agent, mirror, one, job="kept")
        stage = await staged(agent, mirror, two, job="gone")
        await agent.stages.release(stage.id)
        mirror.ask(EvictCommand(id="evc_1", all=True))

        evicted = (await mirror.answered("evc_1")).evict

        assert evicted is not None
        assert [(item.manifest, item.refused, item.bytes) for item in evicted.items] == [
            (str(two.digest), False, 100),
            (str(one.digest), True, 0),
        ]
        assert evicted.items[1].holders == [f"job kept (stage {kept.id})"]
        assert agent.cache.index.manifests() == (one.digest,)
        await mirror.heard(lambda beat: not beat.reports)  # told until it was heard


async def test_a_repeated_command_is_carried_out_once(
    mirror: ListeningMirror, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[str] = []
    real = EvictionCommands.evict

    async def note(evictions: EvictionCommands, command: EvictCommand) -> list[EvictedItem]:
        carried.append(command.id)
        return await real(evictions, command)

    monkeypatch.setattr(EvictionCommands, "evict", note)
    async with rig.agent() as agent:
        for _ in range(3):
            mirror.ask(EvictCommand(id="evc_1", all=True))
            await agent.heartbeats.beat()
        mirror.ask(EvictCommand(id="evc_2", all=True))
        await mirror.answered("evc_2")

        assert carried == ["evc_1", "evc_2"]


async def test_a_command_that_cannot_be_carried_out_or_is_unknown_is_reported_with_its_error(
    mirror: ListeningMirror, rig: Rig
) -> None:
    async with rig.agent():
        mirror.ask(EvictCommand(id="evc_1"))
        mirror.ask(EvictCommand(id="evc_2", all=True, job="x"))
        mirror.ask(EvictCommand(id="evc_3", manifests=["rubbish"]))
        mirror.commands.append(Command(id="of_a_later_version"))

        for command in ("evc_1", "evc_2", "evc_3", "of_a_later_version"):
            report = await mirror.answered(command)
            assert report.error is not None
            assert report.error.code == "INVALID_REQUEST"


async def test_a_bug_in_a_heartbeat_does_not_end_the_agent(
    mirror: ListeningMirror, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: AgentHoldings) -> list[Holding]:
        raise RuntimeError("a bug")

    manifest = mirror.publish({"f": b"f"})
    async with rig.agent() as agent:
        await agent.heartbeats.beat()
        with monkeypatch.context() as patched:
            patched.setattr(AgentHoldings, "all", broken)
            stage = await staged(agent, mirror, manifest)
            while "a heartbeat failed" not in caplog.text:
                await asyncio.sleep(0)
        await agent.stages.release(stage.id)
        await mirror.heard(lambda beat: any(one.complete for one in held(beat)))


@pytest.fixture
def down() -> AgentMirror:
    """A mirror that was there once."""
    mirror = AgentMirror()
    with mirror.running():
        pass
    return mirror


async def test_without_a_mirror_only_known_keys_are_believed_and_it_is_complained_about_once(
    tmp_path: Path, down: AgentMirror, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = down.publish({"f": b"f"})
    async with Rig(down, tmp_path).agent() as agent:
        for _ in range(3):
            with pytest.raises(GrantInvalidError, match="a key that is not known here"):
                await agent.stages.start("job", down.grant(manifest))

        complaints = [record for record in caplog.records if "heartbeats to the mirror fail" in record.message]
        assert len(complaints) == 1
