"""The members of this cluster, and as sources of chunks: which are avoided, and how long each is waited for.

A source is waited for until it gives a sign of life, until bytes come at all, and for bytes as fast as they usually come.
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
    """An owner of chunks: an agent with the role ``cluster``, and the address at which its peers read from it."""

    node: str
    advertise: str


@dataclass(frozen=True, slots=True)
class View:
    """The owners at one epoch, in the order of their names. The same members make the same placement at any epoch."""

    epoch: int
    members: tuple[RingMember, ...]


class Members:
    """The newest view. ``me`` is this node's own name. May be used from any thread.

    A view that the mirror asked about later is never undone by an answer to an earlier question: A asks, and waits with
    its question open; B asks, is answered with epoch 7, and then A's answer comes with epoch 6. Otherwise the mirror is
    believed, even when its epoch is an older one: then its database is another, or was set back.

    With ``requires_tls`` a member that would be spoken to in the clear is none: nothing is sent to it.
    """

    def __init__(self, me: str, path: Path, *, requires_tls: bool = False) -> None:
        self.me = me
        self._requires_tls = requires_tls
        self._refused: frozenset[str] = frozenset()  # of those, whom the log has named
        self._path = path
        self._view = View(0, ())
        self._taken = 0  # answers taken up
        self._lock = threading.Lock()

    def current(self) -> View:
        """The newest view; without members until a mirror was heard of."""
        return self._view

    def load(self) -> None:
        """The view of the last run. Blocking. A damaged file is as good as none: the next heartbeat brings the members."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self._path.read_bytes())
            members = [RingMember(**member) for member in content["members"]]
            self._view = View(int(content["epoch"]), self._admitted(members))

    def ask(self) -> int:
        """To be called before the mirror is asked; ``take`` wants the result with the answer."""
        return self._taken

    def take(self, epoch: int, members: Iterable[MemberDocument], asked: int) -> None:
        """Believe an answer, unless a newer one came while it was on its way.

        Blocking when it is. Raises ``DiskFailedError``: the view is believed, but could not be kept for the next start.
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
                "%s is asked for nothing: its address is one of plain HTTP, and here BDN_AGENT_TLS=require; "
                "give it BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY",
                node,
            )
        self._refused = refused
        return admitted


def _owns(member: MemberDocument) -> bool:
    return "cluster" in member.roles


_HELD_SECONDS: Final = 5.0  # and as long again we wait for a late peer, when nothing more may be asked for twice

# A link that is as slow as one in trouble is told from a busy one by what it brings, in multiples of what is usual: after
# the first of these at the earliest, when the whole would take longer than the last; the one between is for a peer at fault.
# An owner that twenty ask at once for the chunk that it has just read takes six times as long as is usual: whoever leaves it
# finds nobody else who has that chunk, and the mirror sends it once more.
_TRIED: Final = 1.5
_LATE: Final = 2.0
_HOPELESS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest that nothing may come before a source is given up.

    A peer that works on an answer says so every second, over a link that may be full. ``document_seconds`` are for the root
    of a manifest from the mirror: the first time that it is asked, when peers may have it, and later.
    """

    peer_seconds: float = 10.0
    mirror_seconds: float = 20.0
    stall: StallPolicy = field(default_factory=StallPolicy)
    document_seconds: tuple[float, float] = (10.0, 300.0)


class LateError(Exception):
    """The peer is to be left, and the rest asked for elsewhere. Never seen outside of a fill.

    ``failure`` is empty when a limit has passed and the stage may still ask for bytes a second time. ``is_fault`` is whether
    the peer is to blame; it is not when we have nothing else to do than to ask elsewhere.
    """

    def __init__(self, failure: str = "", *, is_fault: bool = True) -> None:
        super().__init__(failure)
        self.failure = failure
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds until an answer should begin, and from then on until it should have come; and what a body usually takes.

    The last is for the end of a stage: when an answer that has not begun may be asked for elsewhere.
    """

    head_seconds: float
    body_seconds: float
    usual_seconds: float = inf
    ending_head_seconds: float = inf


@dataclass(frozen=True, slots=True)
class Alternative:
    """There is another source to go to: how late this one may be, and what is to be asked before it is left.

    ``limits`` are asked for at each judgement, because what others achieve meanwhile counts. ``may_leave`` is told the bytes
    that would be asked for again; ``is_ending`` is whether the stage has nothing else left to ask of peers.
    """

    limits: Callable[[], Limits]
    may_leave: Callable[[int], bool]
    is_at_fault: Callable[[], bool]
    is_ending: Callable[[], bool] = lambda: False


_USUAL: Final = Waits()


@dataclass(slots=True, eq=False)
class SourceDeadline:
    """How long one request for ``size`` bytes is waited for (an ``AnswerDeadline``).

    One that has an ``alternative`` is left when it is late. Head and body are judged apart: an owner that waits for the mirror
    says that it is alive, and asking another one too soon would make the mirror send the chunk twice; but an owner whose link
    is slow is slow with the mirror as well. A body is late, too, when the whole would take many times what is usual, at the
    pace up to now. Once ``is_at_fault``, because another request to the same peer was late, this one is late as well unless it
    will be in time: what is slow is a link, and seldom one chunk. One that is late and may not be left goes on for as long
    again and then fails; to a peer that was at fault before, it fails at once. Towards the end of a stage a node waits less long for
    answers to begin: its last chunks would else be those of the slowest peer, whom nobody had the time to find out.
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
    _held_until: float | None = field(default=None, init=False)  # late, and not allowed to leave
    _unjudged: int = field(default=0, init=False)  # bytes
    _next: float = field(default=0.0, init=False)  # when the body is judged again

    def __post_init__(self) -> None:
        self._asked = self._heard = self.clock()

    @classmethod
    def of_peer(
        cls, size: int, stop: threading.Event, alternative: Alternative, clock: Clock, waits: Waits = _USUAL
    ) -> Self:
        """Of a request to a peer, which is left for another source when it is late."""
        return cls(size, stop, waits.peer_seconds, alternative, waits.stall, clock)

    @classmethod
    def of_mirror(cls, size: int, stop: threading.Event, clock: Clock = time.monotonic, waits: Waits = _USUAL) -> Self:
        """Of a request to the mirror, behind which there is nobody."""
        return cls(size, stop, waits.mirror_seconds, stall=waits.stall, clock=clock)

    @property
    def has_begun(self) -> bool:
        """Whether the head of the answer came."""
        return self._begun is not None

    @property
    def taken(self) -> Limits:
        """How long head and body took, up to now."""
        now = self.clock()
        begun = now if self._begun is None else self._begun
        return Limits(begun - self._asked, now - begun)

    def waiting(self) -> None:
        """Raises ``LateError`` when a peer is to be left, ``StoreUnavailableError`` when the mirror is silent for too long."""
        self._check_stop()
        if (silence := self.clock() - self._heard) >= self.silence_seconds:
            self._fail(f"no sign of life for {silence:.1f} s")
        if (other := self.alternative) is not None:
            seconds, limits = self.taken.head_seconds, other.limits()
            if seconds >= limits.ending_head_seconds and other.is_ending():
                raise LateError(is_fault=False)
            is_late = seconds >= limits.head_seconds or other.is_at_fault()
            self._judge(other, seconds, 0, is_late=is_late)  # nothing came: nothing comes twice

    def at_work(self) -> None:
        """A sign of life."""
        self._heard = self.clock()

    def receiving(self, count: int) -> None:
        """Raises ``LateError`` when a peer is to be left, ``StoreUnavailableError`` when the mirror's body has stalled."""
        self._check_stop()
        now = self.clock()
        if self._window is None or self._begun is None:
            self._window = StallWindow(self.stall, self.size, now)
            self._begun, self._held_until = now, None
        self._unjudged += count
        if now < self._next:  # bytes come in small pieces where the link is slow, and there is little to say about each
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
            if was_at_fault:  # what waits for a peer that is known to be in trouble waits in vain
                self._fail("others had to leave it")
            self._held_until = 2 * seconds + _HELD_SECONDS
        if self._held_until is not None and seconds >= self._held_until:
            self._fail(f"too slow: not done after {seconds:.1f} s")

    def _fail(self, reason: str) -> None:
        raise LateError(reason) if self.alternative is not None else StoreUnavailableError(reason)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise CanceledError("the transfer")


# Towards the end of a stage we wait for an answer twice as long as nine of ten took to begin lately: whoever is asked instead
# has to read the chunk from the mirror first, which then sends it once more.
_ENDING: Final = 2.0
_LEAST_ENDING_SECONDS: Final = 10.0
MIRROR: Final = ""  # among the names of sources; no node is called so


class Peers:
    """Shared by all stages of the agent: what one stage learns about a peer or the mirror, the others know. Safe for any thread."""

    def __init__(self, members: Members, most: int, clock: Clock = time.monotonic) -> None:
        """``most`` is how many chunks this node may ask of all owners at once."""
        self.clock = clock
        self.members = members
        self._most = most
        self._in_flight: Counter[str] = Counter()  # requests to obtain a chunk, by owner
        self._waits: dict[SourceDeadline, str] = {}  # requests to obtain a chunk, with the owner
        self._left: Counter[str] = Counter()  # how often an owner was left before its answer had begun
        self._standing = PeerHealth()
        self._heads = Deadlines(shortest=3.0)  # in a cold cluster owners wait for the mirror
        self._bodies = Deadlines()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)

    def address(self, node: str) -> str | None:
        """Where it serves chunks; None when it has left."""
        return next((member.advertise for member in self.members.current().members if member.node == node), None)

    def is_avoided(self, node: str) -> bool:
        """Whether it is left alone just now."""
        with self._lock:
            return self._standing.is_avoided(node, self.clock())

    def is_at_fault(self, node: str) -> bool:
        """Whether its last fault, the mirror's or a peer's, is so new that nobody should wait for it."""
        with self._lock:
            return self._standing.is_at_fault(node, self.clock())

    def claim(self, node: str) -> bool:
        """Whether it may be asked now. The end is to be reported, by ``served``, ``failed`` or ``late``."""
        with self._lock:
            return self._standing.claim(node, self.clock())

    @contextmanager
    def place(self, owner: str, stop: threading.Event) -> Iterator[bool]:
        """Wait for one of the requests that an owner may get from this node at once. Raises ``CanceledError`` once ``stop`` is set.

        Yields False when another thread left the owner meanwhile: then the chunk is to be asked for elsewhere.

        The last chunks of a stage are those of the busiest owners. If every node asked them for all of those at once, each chunk would
        come so late that it is asked for elsewhere, where nobody has it yet. A question whether a peer holds a chunk needs no
        place: a node may ask it while it holds its own place at the mirror, for which other nodes wait.
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
        """It sent so many bytes in so long, and the chunk is right."""
        with self._lock:
            self._standing.succeeded(node, self.clock())
            self._heads.came(0, taken.head_seconds)
            self._bodies.came(size, taken.body_seconds)

    def answered(self, node: str) -> None:
        """It did its part, with something else than a chunk."""
        with self._lock:
            self._standing.succeeded(node, self.clock())

    def read(self, size: int, taken: Limits) -> None:
        """The mirror sent so many bytes in so long. An owner's answer begins when it has read as much."""
        with self._lock:
            self._standing.succeeded(MIRROR, self.clock())
            self._heads.came(0, taken.head_seconds + taken.body_seconds)
            self._bodies.came(size, taken.body_seconds)

    def failed(self, node: str, fault: Fault = Fault.FAILED) -> None:
        """It did not do its part."""
        with self._lock:
            self._standing.blame(node, fault, self.clock())

    def sent_wrong(self, senders: Sequence[str]) -> None:
        """A chunk is wrong. Who sent all of it is at fault; of several, nobody knows which one is."""
        fault = Fault.WRONG if len(senders) == 1 else Fault.FAILED
        for sender in senders:
            if sender != MIRROR:
                self.failed(sender, fault)

    def late(self, node: str, *, has_begun: bool) -> None:
        """It was left at a limit, before or after its answer had begun."""
        with self._lock:
            self._standing.blame(node, Fault.SLOW, self.clock())
            (self._bodies if has_begun else self._heads).left()

    def left(self, node: str) -> None:
        """A thread left it before its answer began: the threads that wait for a place there go elsewhere, too."""
        with self._freed:
            self._left[node] += 1
            self._freed.notify_all()

    @contextmanager
    def waited_for(self, owner: str, deadline: SourceDeadline) -> Iterator[None]:
        """An owner is asked to obtain a chunk. How long it keeps us waiting counts when others are judged."""
        with self._lock:
            self._waits[deadline] = owner
        try:
            yield
        finally:
            with self._lock:
                del self._waits[deadline]

    def limits(self, node: str, size: int) -> Limits:
        """How long ``size`` bytes from this peer may take, by what is known now."""
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
        """Who is avoided now, of those who are members."""
        with self._lock:
            self._standing.keep({MIRROR, *(member.node for member in self.members.current().members)})
            return tuple(name for name in self._standing.avoided(self.clock()) if name != MIRROR)
