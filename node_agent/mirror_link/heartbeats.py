"""The mirror hears how this node is, and says what to do and whose signatures to believe."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import BdnError, DiskFailedError
from bdn.net.client.mirror_client import MirrorClient
from bdn.wire.agent_schema import Heartbeat, HeartbeatReply
from node_agent.background_tasks import BackgroundTasks, in_thread
from node_agent.fetch.peers import Members
from node_agent.journal import Journal
from node_agent.mirror_link.commands import CommandInbox
from node_agent.mirror_link.holdings import AgentHoldings
from node_agent.trust import Trust


class ChangeSignal:
    """Counts changes and wakes whoever tells them. ``tell`` is called on the event loop."""

    def __init__(self) -> None:
        self.version = 1
        self._event = asyncio.Event()

    def tell(self) -> None:
        """What this node holds, or who needs it, is another now."""
        self.version += 1
        self._event.set()

    def wake(self) -> None:
        """Nothing changed, but there is something to say."""
        self._event.set()

    async def wait(self) -> None:
        """Until there is news; several changes in a row are one."""
        await self._event.wait()
        self._event.clear()


logger = logging.getLogger(__name__)
_WAIT_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 10.0  # a mirror that comes back shall hear of its members before it misses any
_LEAVE_SECONDS: Final = 2.0
_NEWS_PAUSE_SECONDS: Final = 0.25  # a heartbeat costs more than a small stage, and would be told of each one twice


@dataclass(frozen=True)
class AgentIdentity:
    """Who this agent is, to the mirror and to its peers."""

    node: str
    cluster: str
    boot_id: str
    roles: list[str]
    advertise: str | None
    version: str


class Heartbeats:
    """Two loops on one state: one listens with long requests, one tells soon what has changed."""

    def __init__(
        self,
        identity: AgentIdentity,
        client: MirrorClient,
        *,
        trust: Trust,
        members: Members,
        holdings: AgentHoldings,
        inbox: CommandInbox,
        news: ChangeSignal,
        journal: Journal,
    ) -> None:
        self._identity = identity
        self._client = client
        self._trust = trust
        self._members = members
        self._holdings = holdings
        self._inbox = inbox
        self._news = news
        self._journal = journal
        self._told = 0  # the version of the news that the mirror has heard
        self._asked = 0
        self._believed = 0  # which of them the keys are from
        self._is_down = False

    def start(self, background: BackgroundTasks) -> None:
        """Begin; the loops end with the background."""
        background.start(self._listen(), "heartbeat")
        background.start(self._tell(), "heartbeat: news")

    async def beat(self, wait_seconds: float = 0) -> HeartbeatReply:
        """One heartbeat; takes up what the answer brings. Raises ``BdnError`` when there is none."""
        return (await self._beat(wait_seconds))[0]

    async def leave(self) -> None:
        """The last word: peers shall not wait to find out. If it cannot be said, the mirror will miss us."""
        with suppress(BdnError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._client.heartbeat((await self._heartbeat(0)).model_copy(update={"leaving": True}))

    async def _beat(self, wait_seconds: float) -> tuple[HeartbeatReply, bool]:
        """The answer, and whether it brought other members."""
        version, asked = self._news.version, self._members.ask()
        self._asked += 1
        number = self._asked
        heartbeat = await self._heartbeat(wait_seconds)
        reply = await self._client.heartbeat(heartbeat)
        self._told = max(self._told, version)
        self._inbox.delivered(heartbeat.reports)
        are_others = await self._believe(reply, asked, number)
        if heartbeat.events:
            await in_thread(self._journal.mark_reported, heartbeat.events)
        for command in reply.pending:
            self._inbox.accept(command)
        return reply, are_others

    async def _heartbeat(self, wait_seconds: float) -> Heartbeat:
        who = self._identity
        version = self._news.version
        return Heartbeat(
            node=who.node,
            cluster=who.cluster,
            boot_id=who.boot_id,
            roles=who.roles,
            advertise=who.advertise,
            version=who.version,
            tiers=await self._holdings.tiers(),
            holdings=await self._holdings.all() if version != self._told else None,
            reports=self._inbox.reports(),
            # Not with a request that is kept open: they would be told again before it is answered.
            events=[] if wait_seconds else await in_thread(self._journal.unreported),
            epoch=self._members.current().epoch,
            wait_seconds=wait_seconds,
        )

    async def _believe(self, reply: HeartbeatReply, asked: int, number: int) -> bool:
        """Take up keys and members; returns whether the members are others."""
        try:
            if number >= self._believed:  # of two answers, the one to the later question tells the keys
                self._believed = number
                await in_thread(self._trust.update, reply.public_keys)
            if reply.members is not None:
                return await in_thread(self._members.take, reply.epoch, reply.members, asked)
        except DiskFailedError as error:
            logger.warning("the mirror's keys and members are not kept for the next start: %s", error)
            return True
        return False

    async def ask_for_keys(self) -> None:
        """A grant is signed with a key that we do not know. If the mirror is down, we go on not knowing it."""
        try:
            await self.beat()
        except BdnError as error:
            self._note_failure(error)

    async def _listen(self) -> None:
        pause = 1.0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                reply, are_others = await self._beat(_WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001 - stages do not end because the mirror cannot be told of them
                self._note_failure(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            self._note_success()
            pause = 1.0
            if self._journal.waiting:
                self._news.wake()
            if loop.time() - began < 1.0:  # it repeats a command, others come and go, or it keeps no request open
                await asyncio.sleep(1.0 if reply.pending or are_others else reply.interval_seconds)

    async def _tell(self) -> None:
        while True:
            await self._news.wait()
            try:
                await self.beat()
            except Exception as error:  # noqa: BLE001 - likewise; the listening loop brings the news later
                self._note_failure(error)
            else:
                if self._journal.waiting:  # there were more than one heartbeat takes, or it was recorded meanwhile
                    self._news.wake()
            await asyncio.sleep(_NEWS_PAUSE_SECONDS)  # what happens meanwhile is told together

    def _note_failure(self, error: Exception) -> None:
        """Said once, until heartbeats are taken again; a bug of ours is said with its traceback."""
        if not isinstance(error, BdnError):
            logger.error("a heartbeat failed", exc_info=error)
        elif not self._is_down:
            logger.warning("the mirror does not take heartbeats: %s; what this node holds can still be staged", error)
        self._is_down = True

    def _note_success(self) -> None:
        if self._is_down:
            logger.info("the mirror takes heartbeats again")
        self._is_down = False
