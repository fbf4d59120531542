"""When an agent asks the mirror again."""

import asyncio
from pathlib import Path
from typing import Any

from bdn.core.errors import InternalError
from bdn.wire.heartbeat_schema import Heartbeat, HeartbeatReply
from node_agent.background_tasks import BackgroundTasks
from node_agent.fetch.peers import Members
from node_agent.mirror_link.commands import CommandInbox
from node_agent.mirror_link.heartbeats import ChangeSignal, Heartbeats
from node_agent.trust import Trust
from tests.support.network.loops import run_hurried

ME = Heartbeat(node="n", cluster="c", boot_id="b", roles=["node"], advertise=None, version="1", tiers={}, holdings=None)
REPLY = HeartbeatReply(members=None, epoch=0, public_keys=[], interval_seconds=5)


class Mirror:
    """Answers as the script says: a letter per heartbeat, ``.`` for an answer and ``x`` for none."""

    def __init__(self, script: str) -> None:
        self.script = list(script)
        self.asked_at: list[float] = []
        self.is_over = asyncio.Event()

    async def heartbeat(self, _: Heartbeat) -> HeartbeatReply:
        if not self.script:
            self.is_over.set()
            await asyncio.Event().wait()
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.script.pop(0) == "x":
            raise InternalError("it is down")
        return REPLY


class Nothing:
    """What a node without anything holds and has recorded."""

    waiting = 0

    async def tiers(self) -> dict[str, Any]:
        return {}

    async def all(self) -> list[Any]:
        return []


def asked_at(script: str, folder: Path) -> list[float]:
    """When an agent sends heartbeats to a mirror that answers so."""

    async def run() -> list[float]:
        mirror, nothing, news = Mirror(script), Nothing(), ChangeSignal()
        async with BackgroundTasks() as background:
            given: Any = {
                "trust": Trust(folder / "keys", lambda: 0.0, news.tell_now),
                "members": Members("n", folder / "members"),
                "holdings": nothing,
                "inbox": CommandInbox(background, {}, news.wake),
                "news": news,
                "journal": nothing,
                "state": dict,
            }
            client: Any = mirror
            Heartbeats(ME, client, **given).start(background)
            await mirror.is_over.wait()
        return mirror.asked_at

    return run_hurried(run())


def test_a_mirror_that_is_down_is_asked_less_and_less_often_until_it_answers(tmp_path: Path) -> None:
    assert asked_at("xxxxxxx.xx.", tmp_path) == [0, 1, 3, 7, 15, 25, 35, 45, 50, 51, 53]


def test_a_mirror_that_keeps_no_request_open_is_asked_as_often_as_it_says(tmp_path: Path) -> None:
    assert asked_at("....", tmp_path) == [0, 5, 10, 15]
