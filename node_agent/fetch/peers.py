"""The members of this cluster as sources of chunks: which of them to avoid, and how long to wait for each.

A source has time limits for a sign of life, for its first byte, and for its last byte, by the usual speed.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Final, Self

from bdn.core.errors import CanceledError, StoreUnavailableError
from bdn.core.pace.retry import StallPolicy, StallWindow
from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth
from bdn.core.ring.placement import in_flight_each
from bdn.disk.durable import disk_errors, write_durably
from bdn.net.http1.answer import TICK_SECONDS
from bdn.wire.heartbeat_schema import MemberDocument
from bdn.wire.http_fields import is_in_the_clear

logger = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RingMember:
    """An owner of chunks: an agent with the role ``cluster``. ``advertise`` is its address for peers."""

    node: str
    advertise: str


@dataclass(frozen=True, slots=True)
class View:
    """The owners at one epoch, sorted by name. The same members give the same placement at any epoch."""

    epoch: int
    members: tuple[RingMember, ...]


class Members:
    """The newest view of the members. ``me`` is this node's name. Thread-safe.

    A late answer to an older request never overrides a newer one: A sends a request, and waits; B sends one, is
    answered with epoch 7, and then A's answer arrives with epoch 6. Otherwise the mirror is right even with an older
    epoch: then its database was replaced or restored.

    With ``requires_tls`` members with plain-HTTP addresses are left out: nothing is sent to them.
    """

    def __init__(self, me: str, path: Path, *, requires_tls: bool = False) -> None:
        self.me = me
        self._requires_tls = requires_tls
        self._refused: frozenset[str] = frozenset()  # plain-HTTP members that were logged
        self._path = path
        self._view = View(0, ())
        self._taken = 0  # number of answers applied
        self._lock = threading.Lock()

    def current(self) -> View:
        """Without members until the mirror has answered once."""
        return self._view

    def load(self) -> None:
        """Load the last run's view. Blocking. A damaged file is ignored: the next heartbeat gets the members."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self._path.read_bytes())
            members = [RingMember(**member) for member in content["members"]]
            self._view = View(int(content["epoch"]), self._admitted(members))

    def ask(self) -> int:
        """Call before a request to the mirror, and pass the result to ``take`` with the answer."""
        return self._taken

    def take(self, epoch: int, members: Iterable[MemberDocument], asked: int) -> None:
        """Apply an answer, unless a newer one was applied since its request.

        Blocks when applying. Raises ``DiskFailedError``: the view is applied, but not saved for the next start.
        """
        owners = sorted(
            (RingMember(member.node, member.advertise) for member in members if _owns(member) and member.advertise),
            key=lambda member: member.node,
        )
        view = View(epoch, self._admitted(owners))
        with self._lock:
            if view == self._view or (epoch < self._view.epoch and asked != self._taken):
                return
            self._view, self._taken = view, self._taken + 1
            with disk_errors(self._path):
                write_durably(self._path, json.dumps(asdict(view)).encode())

    def _admitted(self, owners: Sequence[RingMember]) -> tuple[RingMember, ...]:
        if not self._requires_tls:
            return tuple(owners)
        admitted = tuple(one for one in owners if not is_in_the_clear(one.advertise) or one.node == self.me)
        refused = frozenset(one.node for one in owners if one not in admitted)
        for node in sorted(refused - self._refused):
            logger.warning(
                "not reading from peer %s: its address is plain HTTP, and BDN_AGENT_TLS=require here; "
                "set BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY on that node",
                node,
            )
        self._refused = refused
        return admitted


def _owns(member: MemberDocument) -> bool:
    return "cluster" in member.roles


_HELD_SECONDS: Final = 5.0  # added to the wait for a late peer when the hedge budget is used up

# A slow link is distinguished from a busy one by its speed, in multiples of the usual time. A body is judged after
# ``_TRIED`` at the earliest, and is late if the whole would take longer than ``_HOPELESS``; ``_LATE`` is for a peer at
# fault. An owner with requests of twenty nodes for a chunk that it has just read takes six times the usual time: a node
# that leaves it finds no other holder of the chunk, and the mirror sends the chunk once more.
_TRIED: Final = 1.5
_LATE: Final = 2.0
_HOPELESS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest silence before a source is given up.

    A peer that works on an answer sends a sign of life every second, over a link that may be full. ``document_seconds``
    are for a root from the mirror: for the first request, when peers may have the root, and for later ones.
    """

    peer_seconds: float = 10.0
    mirror_seconds: float = 20.0
    stall: StallPolicy = field(default_factory=StallPolicy)
    document_seconds: tuple[float, float] = (10.0, 300.0)


class LateError(Exception):
    """Leave the peer, and request the remaining bytes elsewhere. Never leaves a fill.

    ``failure`` is empty if a limit has passed and the hedge budget allows a second request. ``is_fault``: whether the
    peer is to blame; False if this node merely has nothing else left to do.
    """

    def __init__(self, failure: str = "", *, is_fault: bool = True) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until an answer should begin, seconds from then until its end, and the usual seconds of a body.

    ``ending_head_seconds`` is for the end of a stage: when an answer that has not begun may be requested elsewhere.
    """

    head_seconds: float
    body_seconds: float
    usual_seconds: float = inf
    ending_head_seconds: float = inf


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another source to go to: how late the current one may be, and what to check before leaving it.

    ``limits`` is called at each check, because they depend on other requests meanwhile. ``may_leave`` gets the number
    of bytes to request again. ``is_ending``: whether the stage has nothing else left to request from peers.
    """

    limits: Callable[[], Limits]
    may_leave: Callable[[int], bool]
    is_at_fault: Callable[[], bool]
    is_ending: Callable[[], bool] = lambda: False


_USUAL: Final = Waits()


@dataclass(slots=True, eq=False)
class SourceDeadline:
    """How long to wait for one request for ``size`` bytes (an ``AnswerDeadline``).

    A request with an ``alternative`` is left when it is late. Head and body are judged separately: an owner that waits
    for the mirror sends signs of life, and leaving it too soon would make the mirror send the chunk twice; but an owner
    with a slow link is slow with the mirror as well. A body is also late if the whole, at the pace so far, would take
    many times the usual time. Once ``is_at_fault``, because another request to the same peer was late, this one is late
    too unless it will be in time: usually the link is slow, not one chunk. A late request that may not be left waits
    for as long again, then fails; if the peer was at fault before, it fails at once. Towards the end of a stage the
    wait for heads is shorter: otherwise the stage would end waiting for the slowest peer, not yet known to be slow.
    """

    size: int
    stop: threading.Event
    silence_seconds: float
    alternative: Alternative | None = None
    stall: StallPolicy = field(default_factory=StallPolicy)
    clock: Clock = time.monotonic
    _asked: float = field(init=False)
    _heard: float = field(init=False)
    _window: StallWindow | None = field(default=None, init=False)
    _begun: float | None = field(default=None, init=False)
    _held_until: float | None = field(default=None, init=False)  # set if late, and not allowed to leave
    _unjudged: int = field(default=0, init=False)  # bytes
    _next: float = field(default=0.0, init=False)  # time of the next check of the body

    def __post_init__(self) -> None:
        self._asked = self._heard = self.clock()

    @classmethod
    def of_peer(
        cls, size: int, stop: threading.Event, alternative: Alternative, clock: Clock, waits: Waits = _USUAL
    ) -> Self:
        """Deadline of a request to a peer, which is left for another source when late."""
        return cls(size, stop, waits.peer_seconds, alternative, waits.stall, clock)

    @classmethod
    def of_mirror(cls, size: int, stop: threading.Event, clock: Clock = time.monotonic, waits: Waits = _USUAL) -> Self:
        """Deadline of a request to the mirror, which has no alternative."""
        return cls(size, stop, waits.mirror_seconds, stall=waits.stall, clock=clock)

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer has arrived."""
        return self._begun is not None

    @property
    def taken(self) -> Limits:
        """Seconds that head and body took so far."""
        now = self.clock()
        begun = now if self._begun is None else self._begun
        return Limits(begun - self._asked, now - begun)

    def waiting(self) -> None:
        """Raises ``LateError`` to leave a peer, ``StoreUnavailableError`` if the mirror is silent for too long."""
        self._check_stop()
        if (silence := self.clock() - self._heard) >= self.silence_seconds:
            self._fail(f"no response for {silence:.1f} s")
        if (other := self.alternative) is not None:
            seconds, limits = self.taken.head_seconds, other.limits()
            if seconds >= limits.ending_head_seconds and other.is_ending():
                raise LateError(is_fault=False)
            is_late = seconds >= limits.head_seconds or other.is_at_fault()
            self._judge(other, seconds, 0, is_late=is_late)  # 0: no bytes arrived, so none would be sent twice

    def at_work(self) -> None:
        self._heard = self.clock()

    def receiving(self, count: int) -> None:
        """Raises ``LateError`` to leave a peer, ``StoreUnavailableError`` if the mirror's body has stalled."""
        self._check_stop()
        now = self.clock()
        if self._window is None or self._begun is None:
            self._window = StallWindow(self.stall, self.size, now)
            self._begun, self._held_until = now, None
        self._unjudged += count
        if now < self._next:  # a slow link delivers many small pieces; judging each would cost time
            return
        self._next = now + TICK_SECONDS
        count, self._unjudged = self._unjudged, 0
        if slow := self._window.judge(count, now):
            self._fail(slow)
        if self.alternative is not None:
            self._judge_body(self.alternative, now - self._begun, self._window.missing)

    def _judge_body(self, other: Alternative, seconds: float, missing: int) -> None:
        limits = other.limits()
        usual, at_this_pace = limits.usual_seconds, seconds * self.size / max(1, self.size - missing)
        is_hopeless = seconds >= _TRIED * usual and at_this_pace > _HOPELESS * usual
        is_late_as_others = at_this_pace > min(_LATE * usual, limits.body_seconds) and other.is_at_fault()
        is_late = seconds >= limits.body_seconds or is_hopeless or is_late_as_others
        self._judge(other, seconds, missing, is_late=is_late)

    def _judge(self, other: Alternative, seconds: float, missing: int, *, is_late: bool) -> None:
        if is_late and self._held_until is None:
            was_at_fault = other.is_at_fault()
            if other.may_leave(missing):
                raise LateError
            if was_at_fault:  # waiting for a peer known to be in trouble is in vain
                self._fail("other reads had to leave this peer")
            self._held_until = 2 * seconds + _HELD_SECONDS
        if self._held_until is not None and seconds >= self._held_until:
            self._fail(f"too slow: not done after {seconds:.1f} s")

    def _fail(self, reason: str) -> None:
        raise LateError(reason) if self.alternative is not None else StoreUnavailableError(reason)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise CanceledError("the transfer")


# Towards the end of a stage the wait for a head is twice the 90th percentile of recent heads: the next source has to
# read the chunk from the mirror first, which then sends it once more.
_ENDING: Final = 2.0
_LEAST_ENDING_SECONDS: Final = 10.0
MIRROR: Final = ""  # the mirror's name among sources; no node has this name


class Peers:
    """Health of peers and the mirror, shared by all stages of the agent. Thread-safe."""

    def __init__(self, members: Members, most: int, clock: Clock = time.monotonic) -> None:
        """``most``: chunks that this node may request from all owners at once."""
        self.clock = clock
        self.members = members
        self._most = most
        self._in_flight: Counter[str] = Counter()  # requests to obtain a chunk, by owner
        self._waits: dict[SourceDeadline, str] = {}  # requests to obtain a chunk, with the owner
        self._left: Counter[str] = Counter()  # how often an owner was left before its answer began
        self._standing = PeerHealth()
        self._heads = Deadlines(shortest=3.0)  # in a cold cluster owners wait for the mirror
        self._bodies = Deadlines()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)

    def address(self, node: str) -> str | None:
        """The member's address for chunks; None if it left."""
        return next((member.advertise for member in self.members.current().members if member.node == node), None)

    def is_avoided(self, node: str) -> bool:
        with self._lock:
            return self._standing.is_avoided(node, self.clock())

    def is_at_fault(self, node: str) -> bool:
        """Whether the last fault of a peer or the mirror is so recent that no request should wait for it."""
        with self._lock:
            return self._standing.is_at_fault(node, self.clock())

    def claim(self, node: str) -> bool:
        """Whether a request may be sent now. The caller reports the outcome with ``served``, ``failed`` or ``late``."""
        with self._lock:
            return self._standing.claim(node, self.clock())

    @contextmanager
    def place(self, owner: str, stop: threading.Event) -> Iterator[bool]:
        """Wait for one of this node's places at an owner. Raises ``CanceledError`` once ``stop`` is set.

        Yields False if another thread left the owner meanwhile: request the chunk elsewhere.

        The last chunks of a stage belong to the busiest owners. If every node requested all of them at once, each chunk
        would arrive so late that nodes request it elsewhere, where no peer has it yet. A request for what a peer holds
        needs no place: a node may send it while it holds its own place at the mirror, for which other nodes wait.
        """
        with self._freed:
            left = self._left[owner]
            while self._in_flight[owner] >= self._each() and self._left[owner] == left:
                if stop.is_set():
                    raise CanceledError("the transfer")
                self._freed.wait(TICK_SECONDS)
            is_ours = self._left[owner] == left
            self._in_flight[owner] += is_ours
        try:
            yield is_ours
        finally:
            with self._freed:
                self._in_flight[owner] -= is_ours
                self._freed.notify_all()

    def _each(self) -> int:
        avoided = sum(name != MIRROR for name in self._standing.avoided(self.clock()))
        return in_flight_each(len(self.members.current().members) - 1 - avoided, self._most)

    def served(self, node: str, size: int, taken: Limits) -> None:
        """Report ``size`` bytes and their times, of a chunk that is right."""
        with self._lock:
            self._standing.succeeded(node, self.clock())
            self._heads.came(0, taken.head_seconds)
            self._bodies.came(size, taken.body_seconds)

    def answered(self, node: str) -> None:
        """Report success with something other than a chunk."""
        with self._lock:
            self._standing.succeeded(node, self.clock())

    def read(self, size: int, taken: Limits) -> None:
        """Report ``size`` bytes from the mirror. An owner's answer begins after a read of the same length."""
        with self._lock:
            self._standing.succeeded(MIRROR, self.clock())
            self._heads.came(0, taken.head_seconds + taken.body_seconds)
            self._bodies.came(size, taken.body_seconds)

    def failed(self, node: str, fault: Fault = Fault.FAILED) -> None:
        with self._lock:
            self._standing.blame(node, fault, self.clock())

    def sent_wrong(self, senders: Sequence[str]) -> None:
        """Report a wrong chunk. A single sender is at fault; of several, the culprit is unknown."""
        fault = Fault.WRONG if len(senders) == 1 else Fault.FAILED
        for sender in senders:
            if sender != MIRROR:
                self.failed(sender, fault)

    def late(self, node: str, *, has_begun: bool) -> None:
        """Report that a request was left at a limit, before or after its answer began."""
        with self._lock:
            self._standing.blame(node, Fault.SLOW, self.clock())
            (self._bodies if has_begun else self._heads).left()

    def left(self, node: str) -> None:
        """A thread left the owner before its answer began: threads waiting for a place there go elsewhere, too."""
        with self._freed:
            self._left[node] += 1
            self._freed.notify_all()

    @contextmanager
    def waited_for(self, owner: str, deadline: SourceDeadline) -> Iterator[None]:
        """While an owner obtains a chunk. The wait counts when other owners are judged."""
        with self._lock:
            self._waits[deadline] = owner
        try:
            yield
        finally:
            with self._lock:
                del self._waits[deadline]

    def limits(self, node: str, size: int) -> Limits:
        """The current time limits for ``size`` bytes from this peer."""
        with self._lock:
            waits = [
                (owner, deadline.taken.head_seconds)
                for deadline, owner in self._waits.items()
                if owner != node and not deadline.has_begun
            ]
            others = sum(member.node not in (node, self.members.me) for member in self.members.current().members)
            ending = max(_LEAST_ENDING_SECONDS, _ENDING * self._heads.lately(0))
            return Limits(
                self._heads.unless_shared(self._heads.deadline(0), waits, others),
                self._bodies.deadline(size),
                usual_seconds=self._bodies.usual(size),
                ending_head_seconds=self._heads.unless_shared(ending, waits, others),
            )

    def avoided(self) -> tuple[str, ...]:
        with self._lock:
            self._standing.keep({MIRROR, *(member.node for member in self.members.current().members)})
            return tuple(name for name in self._standing.avoided(self.clock()) if name != MIRROR)
