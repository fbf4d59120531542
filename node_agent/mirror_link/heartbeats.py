"""Heartbeats: report this node's state to the mirror, and apply the commands, keys and members in its answers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

from pydantic import BaseModel

from bdn.core.cache.index import SpaceLedger
from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, DiskFailedError, LimitExceededError
from bdn.disk.direct import DirectWrites
from bdn.disk.threads import in_thread
from bdn.net.api_clients import MirrorClient
from bdn.wire.heartbeat_schema import Heartbeat, HeartbeatReply, HoldingsChange
from bdn.wire.mirror_schema import Holding
from bdn.wire.stage_schema import Cache, TierUse, Writes
from node_agent.background_tasks import BackgroundTasks, happens_within, in_steps
from node_agent.cache.node_cache import NodeCache
from node_agent.cache.space import Room, check_fitness
from node_agent.fetch.peers import Members
from node_agent.journal import Journal
from node_agent.mirror_link.commands import CommandInbox
from node_agent.stage.stage import StageRegistry
from node_agent.trust import Trust

logger = logging.getLogger(__name__)
_HOLDINGS_AT_ONCE: Final = 500  # per step; the event loop does other work between two steps


_Model = TypeVar("_Model", bound=BaseModel)
_MOST_BYTES: Final = 512 * 1024  # of one heartbeat's holdings, and again of its reports and of its events


class ChangeSignal:
    """Counts changes and wakes the heartbeats to report them. Not thread-safe: use on the event loop."""

    def __init__(self) -> None:
        self.beat: Callable[[], Awaitable[None]] | None = None  # set by ``Heartbeats``
        self.version = 1
        self.awaits_command = asyncio.Event()  # while set, no pause delays the next command
        self._event = asyncio.Event()

    def tell(self) -> None:
        """This node's holdings, or their holders, have changed."""
        self.version += 1
        self._event.set()

    def wake(self) -> None:
        """Send a heartbeat soon, although the holdings have not changed."""
        self._event.set()

    async def tell_now(self) -> None:
        """Report changes to the mirror now, and apply its answer. Raises ``BdnError`` if there is none."""
        assert self.beat is not None  # noqa: S101 - set before a job can call this
        await self.beat()

    async def wait(self) -> None:
        """Wait for news; several changes in a row count as one."""
        await self._event.wait()
        self._event.clear()


@dataclass(frozen=True)
class AgentHoldings:
    cache: NodeCache
    roles: Collection[str]
    registry: StageRegistry
    writes: DirectWrites

    async def tiers(self) -> dict[str, TierUse]:
        """Space of the tiers of this agent's roles. A failed disk is reported as ``problem``, not raised."""
        room, problem = await in_thread(self._room)
        space, uses = self.cache.space, {}
        if "node" in self.roles:
            budgets = None if room is None else (room.budgets.node, room.pressed.node)
            leased = await in_steps(self.cache.index.counting_leased())
            uses["node"] = _use(space.node, leased, budgets, problem)
        if "cluster" in self.roles:  # the cluster tier has no leases
            budgets = None if room is None else (room.budgets.cluster, room.pressed.cluster)
            uses["cluster"] = _use(space.cluster, 0, budgets, problem)
        return uses

    def _room(self) -> tuple[Room | None, str | None]:
        """What the tiers may hold, None if the disk failed; and why they admit nothing, None if they do."""
        room = None
        try:
            room = self.cache.space.room()
            check_fitness(self.cache.files.places.root)
        except DiskFailedError as error:
            return room, str(error)
        return room, None

    async def all(self) -> list[Holding]:
        """Manifests held by either tier, least recently used first. Sources come from the known stages."""
        chunks = await in_thread(self.cache.chunks.tier.held)
        index, sources = self.cache.index, self.registry.sources()
        held = []
        for number, manifest in enumerate(dict.fromkeys((*index.manifests(), *chunks)), 1):
            if number % _HOLDINGS_AT_ONCE == 0:
                await asyncio.sleep(0)
            is_staged = index.holds(manifest)
            if not is_staged and manifest not in chunks:
                continue  # evicted meanwhile
            size, last_used = chunks.get(manifest, (0, 0.0))
            held.append(
                Holding(
                    manifest=str(manifest),
                    bytes=index.size_of(manifest) if is_staged else 0,
                    complete=index.is_complete(manifest),
                    last_used=index.recency.last_used(manifest) if is_staged else last_used,
                    sources=sources.get(str(manifest), []),
                    held_by=[holder.job_id for holder in index.leases.holders(manifest)],
                    cluster_bytes=size,
                )
            )
        return sorted(held, key=lambda holding: holding.last_used or 0)

    async def document(self) -> Cache:
        return Cache(
            tiers=await self.tiers(),
            manifests=await self.all(),
            writes=Writes(direct=self.writes.are_direct, reason=self.writes.reason),
        )


def _use(ledger: SpaceLedger, leased: int, budgets: tuple[int, int] | None, problem: str | None) -> TierUse:
    """Figures of one tier. ``budgets`` are its budget and the pressed part; None: the budget is what it holds."""
    budget, pressed = budgets or (ledger.used_bytes, 0)
    return TierUse(
        budget=budget,
        committed=ledger.committed_bytes,
        reserved=ledger.reserved_bytes,
        leased=leased,
        pressed=pressed,
        problem=problem,
    )


@dataclass(frozen=True)
class _Known:
    """The holdings that the mirror has: documents by manifest, and a digest of all."""

    documents: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """Equal for equal holdings, also after a restart."""
        lines = (self.documents[manifest] for manifest in sorted(self.documents))
        return digest_of(b"\n".join(lines)).hex


@dataclass(frozen=True)
class _Telling:
    """The change of the holdings in a heartbeat, and what the mirror has after it."""

    change: HoldingsChange | None
    after: _Known
    version: int  # of the change signal
    is_all: bool = True


class HoldingsTold:
    """Tracks which holdings the mirror has, by the digest in its answers, and computes the next change to send.

    Nothing is sent before the first answer. If the digest is unexpected (the database was restored, or another agent
    has this name), all holdings are sent again in pieces, once an open request is over. Of two concurrent heartbeats,
    the mirror applies the one that fits.
    """

    def __init__(self) -> None:
        self.version = 0  # of the change signal that the mirror has completely
        self._digest: str | None = None
        self._known: _Known | None = None
        self._judged = 0

    def next(self, held: Sequence[Holding], version: int, most_bytes: int) -> _Telling | None:
        """What to send of ``held``, least recently used first. Costs a JSON document per holding."""
        if self._digest is None:
            return None
        documents = {holding.manifest: holding.model_dump_json().encode() for holding in held}
        now = _Known(documents)
        if self._digest == now.digest:
            return _Telling(None, now, version)
        before = self._known.documents if self._known else {}
        others = [holding for holding in held if before.get(holding.manifest) != documents[holding.manifest]]
        gone = [manifest for manifest in before if manifest not in documents][: max(1, most_bytes // 128)]
        others = fitting(others, most_bytes)
        after = {manifest: before[manifest] for manifest in before.keys() - set(gone)}
        after |= {holding.manifest: documents[holding.manifest] for holding in others}
        told = _Known(after)
        base = self._known.digest if self._known else None
        change = HoldingsChange(base=base, digest=told.digest, held=others, gone=gone)
        return _Telling(change, told, version, is_all=after == documents)

    def heard(self, telling: _Telling | None, number: int, digest: str) -> bool:
        """Process the answer to heartbeat ``number``. Returns whether there is more to send at once."""
        if number <= self._judged:  # the answer to a later heartbeat came first
            return False
        self._judged = number
        is_first, self._digest = self._digest is None, digest
        if telling is not None and telling.after.digest == digest:
            self._known = telling.after
            if telling.is_all:
                self.version = max(self.version, telling.version)
            return not telling.is_all
        if self._known is None or self._known.digest != digest:
            self._known, self.version = None, 0
        return is_first


def fitting(items: Sequence[_Model], most_bytes: int) -> list[_Model]:
    """The first items whose documents take at most ``most_bytes`` together; at least one."""
    found: list[_Model] = []
    for item in items:
        most_bytes -= len(item.model_dump_json())
        if found and most_bytes < 0:
            break
        found.append(item)
    return found


_WAIT_SECONDS: Final = 10.0
_LONGEST_PAUSE_SECONDS: Final = 10.0  # a restarted mirror gets heartbeats before it considers members missing
_LEAVE_SECONDS: Final = 2.0
_AWAITING_SECONDS: Final = 0.05
_NEWS_PAUSE_SECONDS: Final = 0.25  # a heartbeat costs more than a small stage, which would cause two


def _pauses() -> Iterator[float]:
    """Seconds to wait after each failure in a row."""
    pause = 1.0
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _is_too_large(error: Exception) -> bool:
    return isinstance(error, BdnError) and error.code == LimitExceededError.code


@dataclass(eq=False)
class Heartbeats:
    """Two loops with shared state: one sends requests that the mirror keeps open, one reports changes soon.

    One heartbeat at a time reports changes and final reports, and never one that stays open: of two concurrent
    changes to the same holdings the mirror applies one, and could apply an eviction's report without the change of the
    holdings.

    ``identity`` is a heartbeat with this agent's identity, for the mirror and its peers, and nothing else. ``state``
    returns other fields that change: job volumes, training caches and stages.
    """

    identity: Heartbeat
    client: MirrorClient
    trust: Trust
    members: Members
    holdings: AgentHoldings
    inbox: CommandInbox
    news: ChangeSignal
    journal: Journal
    state: Callable[[], Mapping[str, object]]
    _told: HoldingsTold = field(default_factory=HoldingsTold)
    _telling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _most_bytes: int = _MOST_BYTES
    _asked: int = 0
    _believed: int = 0  # number of the heartbeat whose answer gave the current keys
    _is_down: bool = False

    def __post_init__(self) -> None:
        self.news.beat = self.beat

    def start(self, background: BackgroundTasks) -> None:
        self.news.wake()  # the first answer gives the digest of the holdings that the mirror has
        background.start(self._listen(), "heartbeat")
        background.start(self._tell(), "heartbeat: news")

    async def beat(self) -> None:
        """Report changes now, and apply the answer. Raises ``BdnError`` if there is none."""
        async with self._telling:
            await self._beat(0)

    async def leave(self) -> None:
        """Sign off, so that peers notice at once. If that fails, the mirror notices missing heartbeats later."""
        with suppress(BdnError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                last, _ = await self._heartbeat(0)
                await self.client.heartbeat(last.model_copy(update={"leaving": True}))

    async def _beat(self, wait_seconds: float) -> tuple[HeartbeatReply, bool]:
        """The answer, and whether its epoch differs from the heartbeat's, even if another answer already gave it."""
        asked = self.members.ask()
        self._asked += 1
        number = self._asked
        heartbeat, telling = await self._heartbeat(wait_seconds)
        try:
            reply = await self.client.heartbeat(heartbeat)
        except BdnError as error:
            if _is_too_large(error):  # this mirror accepts less than the default at once
                self._most_bytes = max(1, self._most_bytes // 2)
            raise
        is_overtaken = bool(wait_seconds) and self._telling.locked()  # the other answer has the newer digest
        if not is_overtaken and self._told.heard(telling, number, reply.holdings_digest):
            self.news.wake()
        self.inbox.delivered(heartbeat.reports)
        await self._believe(reply, asked, number)
        if heartbeat.events:
            await in_thread(self.journal.mark_reported, heartbeat.events)
        for command in reply.pending:
            self.inbox.accept(command)
        return reply, reply.epoch != heartbeat.epoch

    async def _heartbeat(self, wait_seconds: float) -> tuple[Heartbeat, _Telling | None]:
        # Reports before holdings: a mirror that gets an eviction's final report gets holdings without its victims.
        reports = fitting(self.inbox.reports(only_running=bool(wait_seconds)), self._most_bytes)
        version, telling = self.news.version, None
        if version != self._told.version and not wait_seconds:
            held = await self.holdings.all()
            telling = await in_thread(self._told.next, held, version, self._most_bytes)
        events = [] if wait_seconds else await in_thread(self.journal.unreported)
        state: dict[str, object] = {
            "tiers": await self.holdings.tiers(),
            "reports": reports,
            # Not with a request that stays open: other heartbeats would send them again before it is answered.
            "events": fitting(events, self._most_bytes),
            "epoch": self.members.current().epoch,
            "wait_seconds": wait_seconds,
            "changes": telling.change if telling else None,
            "state_at": time.monotonic(),  # in one step with the state: of two heartbeats, the later has the later state
            **self.state(),
        }
        return self.identity.model_copy(update=state), telling

    async def _believe(self, reply: HeartbeatReply, asked: int, number: int) -> None:
        try:
            if number >= self._believed:  # of two answers, the one to the later request has the keys
                self._believed = number
                await in_thread(self.trust.update, reply.public_keys)
            if reply.members is not None:
                await in_thread(self.members.take, reply.epoch, reply.members, asked)
        except DiskFailedError as error:
            logger.warning("cannot store the mirror's keys and members for the next start: %s", error)

    async def _listen(self) -> None:
        pauses = _pauses()
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                reply, are_others = await self._beat(_WAIT_SECONDS)
            except Exception as error:  # noqa: BLE001 - stages do not depend on heartbeats
                self._note_failure(error)
                await asyncio.sleep(next(pauses))
                continue
            self._note_success()
            pauses = _pauses()
            if self.journal.waiting or self._told.version != self.news.version:
                self.news.wake()
            if loop.time() - began < 1.0:  # it repeats a command, members change, or it keeps no request open
                pause = 1.0 if reply.pending or are_others else reply.interval_seconds
                await self._pause(pause)

    async def _tell(self) -> None:
        pauses = _pauses()
        while True:
            await self.news.wait()
            try:
                await self.beat()
            except Exception as error:  # noqa: BLE001 - stages do not depend on heartbeats
                self._note_failure(error)
                self.news.wake()
                await asyncio.sleep(_NEWS_PAUSE_SECONDS if _is_too_large(error) else next(pauses))
                continue
            pauses = _pauses()
            if self.journal.waiting:  # more than fits into one heartbeat, or recorded meanwhile
                self.news.wake()
            await self._pause(_NEWS_PAUSE_SECONDS)  # batch what happens meanwhile

    async def _pause(self, seconds: float) -> None:
        """Wait ``seconds``, but only briefly once a rank awaits its command: its report may be the job's last."""
        if self.news.awaits_command.is_set():
            await asyncio.sleep(_AWAITING_SECONDS)
        else:
            await happens_within(seconds, self.news.awaits_command)

    def _note_failure(self, error: Exception) -> None:
        """Log once until heartbeats succeed again; a bug is logged with its traceback."""
        if not isinstance(error, BdnError):
            logger.error("a heartbeat failed", exc_info=error)
        elif not self._is_down:
            logger.warning("heartbeats to the mirror fail: %s; retrying. Cached content can still be staged", error)
        self._is_down = True

    def _note_success(self) -> None:
        if self._is_down:
            logger.info("heartbeats to the mirror succeed again")
        self._is_down = False
