"""What the readers of one stage share: its grant, the owners of its chunks, and its budget of retries and hedges."""

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
    is_own: bool
    position: int

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key: chunks of this node's own lane come first."""
        return not self.is_own, self.position


class Routing:
    """The owners of chunks among the current members. Thread-safe.

    Members may change while a stage runs: chunks requested afterwards go to their new owners.
    """

    def __init__(self, chunks: Callable[[], Sequence[Digest]], members: Members) -> None:
        """``chunks`` returns distinct chunks in the order common to all nodes; not called while this node is alone."""
        self._chunks = chunks
        self._members = members
        self._index: dict[Digest, int] = {}
        self._made: _Made | None = None
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of members, including this node; 1 if it is alone."""
        owners = {member.node for member in self._members.current().members}
        return len(owners | {self._members.me})

    def peers(self, chunk: Digest, is_avoided: Callable[[str], bool]) -> tuple[str, ...]:
        """Owners to request it from before the mirror. Blocks for a moment after members have changed."""
        made = self._now()
        index = self._index.get(chunk)
        if made is None or index is None:
            return ()
        return route(made.placement.owners(index, OWNERS_LOOKED_AT), self._members.me, is_avoided)

    def sources(self, chunk: Digest, is_avoided: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
        """Peers in the order of requests, each with whether it should obtain the chunk as its owner.

        If the owner does not serve, the next owner would read the chunk from the mirror once more. So before the next
        owner come some peers, only for what they hold: a random choice, to spread the load, of the peers that read from
        the owner before this node.
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
        """The member that reads the chunk from the mirror; None when this node is alone. Blocks like ``peers``."""
        made = self._now()
        index = self._index.get(chunk)
        return made.placement.owner(index) if made is not None and index is not None else None

    def everybody(self, chunk: Digest) -> tuple[str, ...]:
        """All other members, first the owners without this node, as before it joined. Blocks like ``peers``."""
        made, index = self._now(), self._index.get(chunk)
        if made is None or index is None:
            return ()
        owners = made.placement.owners(index, OWNERS_LOOKED_AT)
        return tuple(node for node in dict.fromkeys((*owners, *made.placement.members)) if node != self._members.me)

    def is_mine(self, chunk: Digest) -> bool:
        """Whether peers request the chunk from this node. Blocks like ``peers``."""
        return self.owner(chunk) == self._members.me

    def prepare(self) -> None:
        self._now()

    def turn(self, chunk: Digest) -> LanePlace:
        """The chunk's place by the members of the last ``prepare`` or ``peers``. Does not block."""
        made, index = self._made, self._index.get(chunk)
        return made.turns[index] if made is not None and index is not None else LanePlace(is_own=True, position=0)

    def _now(self) -> _Made | None:
        """The placement among the current members; None when this node is alone."""
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
    """Files filled by one fetch or one file's fetches, and their layout. A name needs 32 bytes here, a layout 500."""

    layout: Layout
    names: bytes

    @property
    def manifest(self) -> Digest:
        return self.layout.manifest

    @property
    def first(self) -> FileLayout:
        """One of the files; all are fetched the same way."""
        return self.layout[Digest.from_bytes(self.names[:_NAME])]

    def files(self) -> list[FileLayout]:
        names = (self.names[at : at + _NAME] for at in range(0, len(self.names), _NAME))
        return [self.layout[Digest.from_bytes(name)] for name in names]


def chunks_in_order(layout: Layout) -> list[Digest]:
    """The distinct chunks of a manifest in the order in which all nodes fetch them: largest files first, then by name.

    Includes chunks that this node has already: otherwise nodes would not agree on the bound of each member's load.
    """
    units = in_order(layout, layout.values())
    return list(dict.fromkeys(chunk for unit in units for chunk in unit.first.fetched))


def in_order(layout: Layout, files: Iterable[FileLayout]) -> list[FillUnit]:
    """Files of the layout, grouped by slab. The largest come first, so that no large file is left to the end."""
    found: defaultdict[tuple[int, str], bytearray] = defaultdict(bytearray)
    for file in files:
        # The size is part of the key: a layout that contradicts itself about a slab fails only for the files concerned.
        name = file.slice.slab if file.slice else file.digest
        found[-file.fetched_size, name.hex] += file.digest.to_bytes()
    return [FillUnit(layout, bytes(found[key])) for key in sorted(found)]


_FREE_ROUNDS: Final = 64  # of failures
_BYTES_PER_ROUND: Final = 10 * CHUNK_SIZE
HEDGED_SHARE: Final = 0.05  # of a stage's bytes that may be requested again because their source was late


class RetryBudget:
    """Remaining retries, and bytes to be requested again from a late source, of one stage. Thread-safe."""

    def __init__(self, size: int, avoided: Callable[[], Sequence[str]]) -> None:
        """``size``: bytes that the stage will fetch. ``avoided`` returns the peers avoided now."""
        self._retries = Allowance(_FREE_ROUNDS + size // _BYTES_PER_ROUND)
        self._rounds = FailureRounds(self._retries)
        self._hedges = Allowance(int(size * HEDGED_SHARE))
        self._avoided = avoided
        self._lock = threading.Lock()

    def retry(self, sent: float) -> bool:
        """Count a failed request, sent at ``sent``. Returns False when the budget is used up, and the stage fails."""
        with self._lock:
            return self._rounds.failed(sent, time.monotonic())

    def arrived(self, sent: float) -> None:
        with self._lock:
            self._rounds.arrived(sent)

    def hedge(self, size: int) -> bool:
        """Whether ``size`` bytes may be requested again elsewhere; spends them."""
        with self._lock:
            return self._hedges.spend(size)

    def document(self) -> Transfer:
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

    ``is_ending`` is true once all remaining chunks are already requested from peers. ``ahead`` are the chunks that this
    node will read from the mirror, roughly in their order.
    """

    manifest: Digest
    bearer: str
    routing: Routing
    budget: RetryBudget
    is_ending: Callable[[], bool] = lambda: False
    ahead: Iterator[Digest] = field(default_factory=lambda: iter(()))
