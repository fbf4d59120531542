"""Every rule of the cluster tier against sets that are counted anew at each step: bringers that overlap, evictions, losses."""

from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bdn.core.cache.index import IN_USE_SECONDS, Admitted, ChunkIndex, EvictionPlan, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(6)]
MANIFESTS = [named(f"manifest {number}") for number in range(4)]
chunks, manifests = st.sampled_from(CHUNKS), st.sampled_from(MANIFESTS)
passing = st.sampled_from([0, 1, 30, 59, 60, 61, 200])


class ChunkIndexMachine(RuleBasedStateMachine):
    """``bringers`` are the calls that read a chunk now: each ends once, whatever others have done to the chunk meanwhile."""

    @initialize(sizes=st.tuples(*[st.integers(0, 4)] * len(CHUNKS)), budget=st.integers(3, 12))
    def build(self, sizes: tuple[int, ...], budget: int) -> None:
        self.index = ChunkIndex()
        self.size = dict(zip(CHUNKS, sizes, strict=True))
        self.budget = budget
        self.now = 1000.0
        self.names: dict[Digest, set[Digest]] = {}  # by manifest
        self.used: dict[Digest, float] = {}  # by manifest; the one touched last stands last
        self.whole: set[Digest] = set()
        self.coming: set[Digest] = set()
        self.bringers: list[Digest] = []

    # --- the oracle ---

    def total(self, of: Iterable[Digest]) -> int:
        return sum(self.size[chunk] for chunk in of)

    def named_by(self, chunk: Digest) -> set[Digest]:
        return {manifest for manifest, held in self.names.items() if chunk in held}

    def by_age(self) -> list[Digest]:
        return sorted(self.used, key=self.used.__getitem__)

    def freed(self, going: list[Digest]) -> set[Digest]:
        """What leaves the disk with all of these together."""
        return {chunk for chunk in self.whole if self.named_by(chunk) <= set(going)}

    def farewell(self, going: list[Digest]) -> list[tuple[Digest, frozenset[Digest]]]:
        return [
            (manifest, frozenset(self.freed(going[: number + 1]) - self.freed(going[:number])))
            for number, manifest in enumerate(going)
        ]

    def name(self, manifest: Digest, chunk: Digest) -> None:
        self.names.setdefault(manifest, set()).add(chunk)
        self.used[manifest] = max(self.now, self.used.pop(manifest, self.now))

    def forget(self, going: list[Digest]) -> None:
        self.whole -= self.freed(going)
        for manifest in going:
            del self.names[manifest], self.used[manifest]

    def victims(self, manifest: Digest, size: int) -> list[Digest] | None:
        """Who goes so that a chunk fits; None when it does not fit now."""
        going: list[Digest] = []
        for oldest in self.by_age():
            if self.total(self.whole | self.coming) - self.total(self.freed(going)) + size <= self.budget:
                break
            if self.now - self.used[oldest] < IN_USE_SECONDS:
                break
            if oldest != manifest:
                going.append(oldest)
        left = self.total(self.whole | self.coming) - self.total(self.freed(going))
        return going if left + size <= self.budget else None

    # --- letting in ---

    @rule(manifest=manifests, chunk=chunks, passed=passing)
    def reserve(self, manifest: Digest, chunk: Digest, passed: int) -> None:
        self.now += passed
        size = self.size[chunk]

        def ask() -> Admitted:
            return self.index.admit(manifest, chunk, size, now=self.now, budget=self.budget)

        if chunk in self.whole | self.coming:
            assert ask() == Admitted((), ())
            self.name(manifest, chunk)
        elif size > self.budget:
            with pytest.raises(CacheTooSmallError) as too_small:
                ask()
            assert (too_small.value.needed_bytes, too_small.value.budget_bytes) == (size, self.budget)
        elif (going := self.victims(manifest, size)) is None:
            with pytest.raises(CacheFullError) as full:
                ask()
            free = max(0, self.budget - self.total(self.whole | self.coming))
            facts = full.value
            assert (facts.needed_bytes, facts.free_bytes, facts.budget_bytes) == (size, free, self.budget)
        else:
            room = ask()
            assert room.missing == (chunk,)
            assert self.plain(room.victims) == self.farewell(going)
            self.forget(going)
            self.name(manifest, chunk)
            self.coming.add(chunk)
            self.bringers.append(chunk)

    @precondition(lambda self: self.bringers)
    @rule(data=st.data(), comes=st.booleans())
    def a_bringer_ends(self, data: st.DataObject, comes: bool) -> None:
        chunk = data.draw(st.sampled_from(self.bringers))
        self.bringers.remove(chunk)
        if not comes:
            self.lose(chunk)
            return
        names = self.named_by(chunk)
        assert self.index.commit(chunk) == names
        self.coming.discard(chunk)
        if names:
            self.whole.add(chunk)

    @rule(chunk=chunks)
    def lose(self, chunk: Digest) -> None:
        names = self.named_by(chunk)
        assert self.index.lose(chunk) == names
        for manifest in names:
            self.names[manifest].discard(chunk)
            if not self.names[manifest]:
                del self.names[manifest], self.used[manifest]
        self.whole.discard(chunk)
        self.coming.discard(chunk)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), passed=passing)
    def a_manifest_is_used(self, data: st.DataObject, passed: int) -> None:
        self.now += passed
        manifest = data.draw(st.sampled_from(self.by_age()))
        self.index.recency.touch(manifest, self.now)
        self.used[manifest] = max(self.now, self.used.pop(manifest))

    # --- taking out ---

    def plain(self, victims: tuple[Victim, ...]) -> list[tuple[Digest, frozenset[Digest]]]:
        for victim in victims:
            assert victim.size == self.total(victim.contents)
            assert len(victim.contents) == len(set(victim.contents))
        return [(victim.manifest, frozenset(victim.contents)) for victim in victims]

    def carry_out(self, plan: EvictionPlan, going: list[Digest], *, really: bool) -> None:
        assert self.plain(plan.victims) == self.farewell(going)
        assert not plan.refused
        if really:
            self.index.evict(plan)
            self.forget(going)

    @rule(asked=st.lists(manifests, max_size=4), really=st.booleans())
    def evict_by_manifest(self, asked: list[Digest], really: bool) -> None:
        going = [manifest for manifest in dict.fromkeys(asked) if manifest in self.names]
        self.carry_out(self.index.plan(asked), going, really=really)

    @rule(size=st.integers(0, 12), really=st.booleans())
    def evict_by_age(self, size: int, really: bool) -> None:
        going: list[Digest] = []
        for manifest in self.by_age():
            if self.total(self.freed(going)) >= size:
                break
            going.append(manifest)
        self.carry_out(self.index.plan_lru(size), going, really=really)

    # --- kill -9 ---

    @rule()
    def crash_and_restart(self) -> None:
        """Chunks on their way leave no trace; whose last chunk that was is not known any more."""
        self.bringers, self.coming = [], set()
        self.names = {manifest: held & self.whole for manifest, held in self.names.items() if held & self.whole}
        self.used = {manifest: self.used[manifest] for manifest in self.by_age() if manifest in self.names}
        self.index = ChunkIndex()
        for manifest, last_used in self.used.items():
            held = {chunk: self.size[chunk] for chunk in self.names[manifest]}
            self.index.restore(manifest, held, last_used=last_used)

    # --- at every step ---

    @invariant()
    def space_is_what_the_model_says_and_within_the_budget(self) -> None:
        ledger = self.index.ledger
        assert ledger.committed_bytes == self.total(self.whole)
        assert ledger.reserved_bytes == self.total(self.coming)
        assert ledger.used_bytes <= self.budget
        for chunk in CHUNKS:
            assert ledger.is_committed(chunk) == (chunk in self.whole)

    @invariant()
    def manifests_and_names_are_those_of_the_model(self) -> None:
        assert list(self.index.manifests()) == self.by_age()
        assert {manifest: self.index.recency.last_used(manifest) for manifest in self.used} == self.used
        assert set(self.index.committed()) == self.whole
        for manifest in MANIFESTS:
            assert self.index.holds(manifest) == (manifest in self.names)
            assert self.index.size_of(manifest) == self.total(self.names.get(manifest, ()))
        for chunk in CHUNKS:
            assert self.index.named_by(chunk) == self.named_by(chunk)


TestChunkIndexMachine = ChunkIndexMachine.TestCase
