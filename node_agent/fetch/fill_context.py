"""What the readers of one stage share: its grant, who owns its chunks, and how many retries and hedges it has left."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout
from bdn.core.layout import Layout
from bdn.core.pace.retry import Allowance, FailureRounds
from bdn.core.ring.placement import HOLDERS_ASKED, OWNERS_LOOKED_AT, Placement, ahead, lanes, route
from bdn.wire.stage_schema import Transfer
from node_agent.fetch.peers import Members, RingMember

_NAME: Final = 32  # bytes of a digest


@dataclass(frozen=True, slots=True)
class LanePlace:
    """The lane of a chunk, and its place in that lane's order."""

    is_own: bool
    position: int

    @property
    def order(self) -> tuple[bool, int]:
        """Chunks of this node's own lane come first."""
        return not self.is_own, self.position


class Routing:
    """The owners of chunks, by the members as they are. Safe for any thread.

    Members may change while a stage runs: chunks that are asked for afterwards go to their new owners.
    """

    def __init__(self, chunks: Callable[[], Sequence[Digest]], members: Members) -> None:
        """``chunks`` are distinct, in the order that all nodes agree on; not called while this node is alone."""
        self._chunks = chunks
        self._members = members
        self._index: dict[Digest, int] = {}
        self._made: _Made | None = None
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many members share the work with this node, itself included; 1 when it is alone."""
        owners = {member.node for member in self._members.current().members}
        return len(owners | {self._members.me})

    def peers(self, chunk: Digest, is_avoided: Callable[[str], bool]) -> tuple[str, ...]:
        """Whom to ask for it before the mirror. Blocks for a moment after members have changed."""
        made = self._now()
        index = self._index.get(chunk)
        if made is None or index is None:
            return ()
        return route(made.placement.owners(index, OWNERS_LOOKED_AT), self._members.me, is_avoided)

    def sources(self, chunk: Digest, is_avoided: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
        """Peers in the order in which they are asked, each with whether it is to obtain the chunk as its owner.

        Where the owner does not serve, the next owner would read the chunk from the mirror once more. So others are asked
        before it, only for what they hold: of those who asked the owner first, some by lot, that not all ask the same.
        """
        made, first = self._now(), self.owner(chunk)
        if made is None or first is None:
            return
        owners = self.peers(chunk, is_avoided)
        if owners and owners[0] == first:
            yield first, True
            owners = owners[1:]
        before = ahead(made.placement.members, first, self._members.me)
        holders = [peer for peer in before if not (peer in owners or is_avoided(peer))]
        for _ in range(min(HOLDERS_ASKED, len(holders))):
            yield holders.pop(random.randrange(len(holders))), False  # noqa: S311 - no secret
        for owner in owners:
            yield owner, True

    def owner(self, chunk: Digest) -> str | None:
        """Who reads it from the mirror for the others; None when this node is alone. Blocks as ``peers`` does."""
        made = self._now()
        index = self._index.get(chunk)
        return made.placement.owner(index) if made is not None and index is not None else None

    def everybody(self, chunk: Digest) -> tuple[str, ...]:
        """All other members: first those who would own it without this node, and did before it joined. Blocks as ``peers`` does."""
        made, index = self._now(), self._index.get(chunk)
        if made is None or index is None:
            return ()
        owners = made.placement.owners(index, OWNERS_LOOKED_AT)
        return tuple(node for node in dict.fromkeys((*owners, *made.placement.members)) if node != self._members.me)

    def is_mine(self, chunk: Digest) -> bool:
        """Whether peers will ask this node for it. Blocks as ``peers`` does."""
        return self.owner(chunk) == self._members.me

    def prepare(self) -> None:
        """Work out what ``turn`` says. Blocking."""
        self._now()

    def turn(self, chunk: Digest) -> LanePlace:
        """Its turn, by the members of the last ``prepare`` or ``peers``. Does not block."""
        made, index = self._made, self._index.get(chunk)
        return made.turns[index] if made is not None and index is not None else LanePlace(is_own=True, position=0)

    def _now(self) -> _Made | None:
        """The placement among the members as they are; None when this node is alone."""
        members, made = self._members.current().members, self._made
        if not any(member.node != self._members.me for member in members):
            return None
        if made is not None and made.members == members:
            return made
        with self._lock:
            if self._made is None or self._made.members != members:
                self._make(members)
            return self._made

    def _make(self, members: tuple[RingMember, ...]) -> None:
        chunks = self._chunks()
        self._index = self._index or {chunk: index for index, chunk in enumerate(chunks)}
        placement = Placement(chunks, [member.node for member in members])
        order = lanes(placement, self._members.me)
        turns = [LanePlace(is_own=True, position=0)] * len(chunks)
        for is_own, lane in ((True, order.own), (False, order.peers)):
            for position, index in enumerate(lane):
                turns[index] = LanePlace(is_own, position)
        self._made = _Made(members, placement, turns)


@dataclass(frozen=True, slots=True)
class _Made:
    members: tuple[RingMember, ...]
    placement: Placement
    turns: list[LanePlace]


@dataclass(frozen=True, slots=True)
class FillUnit:
    """Files that one fetch or one file's fetches bring, and the layout that says so. A name takes 32 bytes here, a layout 500."""

    layout: Layout
    names: bytes

    @property
    def manifest(self) -> Digest:
        """For which they are fetched."""
        return self.layout.manifest

    @property
    def first(self) -> FileLayout:
        """One of them: all are fetched alike."""
        return self.layout.files[Digest.from_bytes(self.names[:_NAME])]

    def files(self) -> list[FileLayout]:
        """Their layouts, made anew."""
        names = (self.names[at : at + _NAME] for at in range(0, len(self.names), _NAME))
        return [self.layout.files[Digest.from_bytes(name)] for name in names]


def chunks_in_order(layout: Layout) -> list[Digest]:
    """The distinct chunks of a manifest in the order that all nodes work through them: the largest files first, then by name.

    The whole layout's, whatever is missing here: otherwise nodes would not agree on the bound of everybody's load.
    """
    units = in_order(layout, layout.files.values())
    return list(dict.fromkeys(chunk for unit in units for chunk in unit.first.fetched))


def in_order(layout: Layout, files: Iterable[FileLayout]) -> list[FillUnit]:
    """Files of the layout, those of a slab together. The largest first, so that the last threads do not wait for a big one at the end."""
    found: defaultdict[tuple[int, str], bytearray] = defaultdict(bytearray)
    for file in files:
        # By size as well: a layout that contradicts itself about a slab fails for the files that it is wrong about.
        name = file.slice.slab if file.slice else file.digest
        found[-file.fetched_size, name.hex] += file.digest.to_bytes()
    return [FillUnit(layout, bytes(found[key])) for key in sorted(found)]


_FREE_ROUNDS: Final = 64  # of failures
_BYTES_PER_ROUND: Final = 10 * CHUNK_SIZE
HEDGED_SHARE: Final = 0.05  # of a stage's bytes, which may be asked for again because their source was late


class RetryBudget:
    """How many retries, and bytes asked for again because their source was late, one stage has left. For all its threads."""

    def __init__(self, size: int, avoided: Callable[[], Sequence[str]]) -> None:
        """For a stage that is to fetch ``size`` bytes. ``avoided`` names the peers that are avoided now."""
        self._retries = Allowance(_FREE_ROUNDS + size // _BYTES_PER_ROUND)
        self._rounds = FailureRounds(self._retries)
        self._hedges = Allowance(int(size * HEDGED_SHARE))
        self._avoided = avoided
        self._lock = threading.Lock()

    def retry(self, sent: float) -> bool:
        """A request of then has failed; False when that was a round too many, and the stage shall fail with the last one."""
        with self._lock:
            return self._rounds.failed(sent, time.monotonic())

    def arrived(self, sent: float) -> None:
        """A request of then has succeeded."""
        with self._lock:
            self._rounds.arrived(sent)

    def hedge(self, size: int) -> bool:
        """Whether so many bytes may be asked for again elsewhere."""
        with self._lock:
            return self._hedges.spend(size)

    def document(self) -> Transfer:
        """The figures, for people."""
        with self._lock:
            return Transfer(
                retries=self._retries.used,
                retries_left=self._retries.left,
                bytes_hedged=self._hedges.used,
                peers_avoided=list(self._avoided()),
            )


@dataclass(frozen=True)
class FillContext:
    """The chunks of ``manifest`` are read with the grant ``bearer``.

    ``is_ending`` tells whether no chunk is left to be asked of peers but those that are being asked for; ``ahead`` are the chunks
    that this node will read from the mirror, about in their order.
    """

    manifest: Digest
    bearer: str
    routing: Routing
    budget: RetryBudget
    is_ending: Callable[[], bool] = lambda: False
    ahead: Iterator[Digest] = field(default_factory=lambda: iter(()))
