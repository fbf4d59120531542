"""Every rule of the cache against the oracle, step by step: fills at once, shared contents, budgets beside a neighbour, crashes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bdn.core.cache.index import CacheIndex, EvictionPlan, Holder, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError
from node_agent.cache.space import TierBudgets, kept, share
from tests.support.agent.cache import at_once
from tests.support.agent.cache_oracle import CacheOracle, Full, Gone, TooSmall
from tests.support.content.names import named, stage
from tests.support.promises.tally import FULL

pytestmark = pytest.mark.promise("space", "leases")
HEADROOM, KEPT_PERCENT = 2, 50  # of the disk, and of what the cache may hold
CONTENTS = [named(f"content {number}") for number in range(10)]
MANIFESTS = [named(f"manifest {number}") for number in range(6)]
manifests = st.sampled_from(MANIFESTS)
stages = st.sampled_from(["s0", "s1", "s2", "s3"])
rarely = st.sampled_from([False, False, False, True])
clock = st.integers(-2, 3)  # a clock may stand still or go back


def plain(victims: tuple[Victim, ...]) -> list[Gone]:
    """The index' victims as the oracle writes them."""
    for victim in victims:
        assert len(victim.contents) == len(set(victim.contents))
    return [Gone(v.manifest, frozenset(v.contents), v.size, v.holders) for v in victims]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.tuples(*[st.sampled_from([3, 1, 2, 4, 5, 6, 7, 8, 9, 0])] * len(CONTENTS)),
        trees=st.tuples(*[st.frozensets(st.sampled_from(CONTENTS), min_size=1, max_size=5)] * len(MANIFESTS)),
        slack=st.integers(0, 6),
    )
    def build(self, sizes: tuple[int, ...], trees: tuple[frozenset[Digest], ...], slack: int) -> None:
        self.index = CacheIndex()
        self.oracle = CacheOracle(dict(zip(MANIFESTS, trees, strict=True)), dict(zip(CONTENTS, sizes, strict=True)))
        self.now = 10
        self.tight = slack + max(map(self.oracle.total, trees))  # every manifest fits alone, hardly two together
        self.bound = 0  # the budget of the last admission that promised space
        self.limits = TierBudgets(node=self.tight, cluster=0)
        self.disk, self.foreign = self.tight + 12, 0  # bytes, and how many of them a neighbour has

    def contents_of(self, manifest: Digest) -> dict[Digest, int]:
        return {content: self.oracle.size[content] for content in CONTENTS if content in self.oracle.trees[manifest]}

    # --- letting in and filling ---

    def admit(self, manifest: Digest, holder: Holder, budget: int) -> None:
        contents, protected = self.contents_of(manifest), self.oracle.leased_contents()
        verdict = self.oracle.admit(manifest, holder, now=self.now, budget=budget)
        admitting = self.index.admitting(manifest, contents, holder, now=self.now, budget=budget)
        if isinstance(verdict, TooSmall):
            with pytest.raises(CacheTooSmallError) as too_small:
                at_once(admitting)
            assert tuple(too_small.value.details().values()) == verdict
        elif isinstance(verdict, Full):
            with pytest.raises(CacheFullError) as full:
                at_once(admitting)
            assert tuple(full.value.details().values())[:4] == verdict
        else:
            admission = at_once(admitting)
            assert plain(admission.victims) == verdict.victims
            assert admission.missing == tuple(content for content in contents if content in verdict.missing)
            assert not any(protected & set(victim.contents) for victim in admission.victims)
            self.bound = budget if verdict.promised else self.bound

    @rule(manifest=manifests, stage_id=stages, passed=clock, change=st.integers(-9, 9))
    def admit_with_a_changed_budget(self, manifest: Digest, stage_id: str, passed: int, change: int) -> None:
        self.now += passed
        self.admit(manifest, stage(stage_id), max(0, self.tight + change))

    @rule(data=st.data(), stage_id=stages, passed=clock)
    def admit_what_is_not_all_here(self, data: st.DataObject, stage_id: str, passed: int) -> None:
        """Left to chance alone, most admissions are of manifests that need no room."""
        self.now += passed
        here = self.oracle.whole | self.oracle.partial
        lacking = [manifest for manifest in MANIFESTS if not self.oracle.trees[manifest] <= here]
        self.admit(data.draw(st.sampled_from(lacking or MANIFESTS)), stage(stage_id), self.tight)

    @rule(wanted=st.permutations(MANIFESTS), filled=st.booleans())
    def a_job_comes_and_goes(self, wanted: list[Digest], filled: bool) -> None:
        for manifest in wanted[:3]:
            self.now += 1
            self.admit(manifest, stage("passing"), self.tight)
            for content in CONTENTS:
                if filled and content in self.oracle.partial and content in self.oracle.trees[manifest]:
                    self.finish(content)
            self.a_stage_ends("passing")

    def finish(self, content: Digest) -> None:
        self.index.commit(content)
        self.oracle.partial.remove(content)
        self.oracle.whole.add(content)

    @precondition(lambda self: self.oracle.partial)
    @rule(data=st.data())
    def one_fill_finishes(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from([content for content in CONTENTS if content in self.oracle.partial])))

    @rule(content=st.sampled_from(CONTENTS))
    def content_is_lost(self, content: Digest) -> None:
        counted = content in self.oracle.whole | self.oracle.partial
        assert self.index.lose(content) == (self.oracle.size[content] if counted else 0)
        self.oracle.whole.discard(content)
        self.oracle.partial.discard(content)

    # --- leases and uses ---

    @precondition(lambda self: self.oracle.used_at)
    @rule(data=st.data(), stage_id=stages)
    def a_lease_is_taken_again(self, data: st.DataObject, stage_id: str) -> None:
        manifest = data.draw(st.sampled_from(self.oracle.by_age()))
        self.index.leases.take(manifest, stage(stage_id))
        self.oracle.lease(manifest, stage(stage_id))

    @rule(stage_id=stages)
    def a_stage_ends(self, stage_id: str) -> None:
        held = {manifest for manifest, holder in self.oracle.leases if holder.stage_id == stage_id}
        assert set(self.index.leases.of(stage_id)) == held
        ended = self.index.leases.end(stage_id)
        assert (set(ended), len(ended)) == (held, len(held))
        self.oracle.end(stage_id)

    @precondition(lambda self: self.oracle.used_at)
    @rule(data=st.data(), passed=clock)
    def a_manifest_is_used(self, data: st.DataObject, passed: int) -> None:
        self.now += passed
        manifest = data.draw(st.sampled_from(self.oracle.by_age()))
        self.index.recency.touch(manifest, self.now)
        self.oracle.touch(manifest, self.now)

    # --- taking out ---

    def carry_out(
        self, plan: EvictionPlan, expected: tuple[list[Gone], list[Digest]], *, force: bool, really: bool
    ) -> None:
        gone, refused = expected
        assert plain(plan.victims) == gone
        assert [(leased.manifest, leased.holders) for leased in plan.refused] == [
            (manifest, self.oracle.holders(manifest)) for manifest in refused
        ]
        if not force:
            assert not any(self.oracle.leased_contents() & each.contents for each in gone)
        if really:
            at_once(self.index.evicting(plan.victims))
            self.oracle.remove(gone)

    @rule(asked=st.lists(manifests, max_size=4), force=rarely, really=st.booleans())
    def evict_by_manifest(self, asked: list[Digest], force: bool, really: bool) -> None:
        expected = self.oracle.plan(asked, force=force)
        plan = at_once(self.index.planning(asked, force=force))
        self.carry_out(plan, expected, force=force, really=really)

    @rule(size=st.integers(0, 30), force=rarely, really=st.booleans())
    def evict_by_age(self, size: int, force: bool, really: bool) -> None:
        expected = self.oracle.plan_lru(size, force=force)
        plan = at_once(self.index.planning(size=size, force=force))
        self.carry_out(plan, expected, force=force, really=really)

    # --- beside a neighbour on the same disk ---

    def budget(self) -> int:
        """As ``Space`` asks for it."""
        keep = kept(TierBudgets(self.index.ledger.used_bytes, 0), self.limits, self.disk, KEPT_PERCENT)
        return share(self.disk - self.foreign - HEADROOM, self.limits, keep).node

    @rule(taken=st.sampled_from([1.0, 0.5, 0.2, 0.0]), is_trimmed=st.booleans())
    def a_neighbour_has_some_of_the_disk(self, taken: float, is_trimmed: bool) -> None:
        """All that is free at the most; sooner or later what is over the budget then goes."""
        used = self.oracle.used()
        self.foreign = min(int(taken * self.disk), max(0, self.disk - used))
        over = used - self.budget()
        if is_trimmed and over > 0:
            plan = at_once(self.index.planning(size=over))
            self.carry_out(plan, self.oracle.plan_lru(over, force=False), force=False, really=True)
            assert used > self.tight * KEPT_PERCENT // 100, "others took what is kept"
            leased = {manifest for manifest, _ in self.oracle.leases}
            assert self.oracle.used() <= self.budget() or leased >= self.oracle.used_at.keys(), "still over the budget"

    @rule(manifest=manifests, stage_id=stages, passed=clock)
    def admit_what_the_disk_has_room_for(self, manifest: Digest, stage_id: str, passed: int) -> None:
        """A stage brings no more than there was or than it evicted."""
        self.now += passed
        before = self.oracle.used()
        self.admit(manifest, stage(stage_id), self.budget())
        assert self.oracle.used() <= max(before, self.disk - self.foreign - HEADROOM)

    # --- kill -9 ---

    @rule(data=st.data(), begun=st.sets(st.sampled_from(CONTENTS)))
    def crash_and_restart(self, data: st.DataObject, begun: set[Digest]) -> None:
        """What was promised but not begun leaves no trace on disk; manifests, last uses and stages were written down."""
        scan_order = data.draw(st.permutations(self.oracle.by_age()))
        self.oracle.restart(scan_order, begun)
        self.index = CacheIndex()
        for manifest in scan_order:
            contents = self.contents_of(manifest)
            on_disk = {c: c in self.oracle.whole for c in contents if c in self.oracle.whole | self.oracle.partial}
            self.index.restore(manifest, contents, on_disk, last_used=self.oracle.used_at[manifest])
        for manifest, holder in self.oracle.leases:
            self.index.leases.take(manifest, holder)

    # --- at every step ---

    @invariant()
    def space_is_what_the_model_says_and_within_the_promised_budget(self) -> None:
        ledger, oracle = self.index.ledger, self.oracle
        assert ledger.committed_bytes == oracle.total(oracle.whole)
        assert ledger.reserved_bytes == oracle.total(oracle.partial)
        assert ledger.used_bytes == ledger.committed_bytes + ledger.reserved_bytes == oracle.used()
        assert ledger.used_bytes <= self.bound
        for content in CONTENTS:
            counted = content in oracle.whole | oracle.partial
            assert ledger.size_of(content) == (oracle.size[content] if counted else None)
            assert ledger.is_committed(content) == (content in oracle.whole)
        assert not oracle.whole & oracle.partial

    @invariant()
    def manifests_and_names_are_those_of_the_model(self) -> None:
        held = self.oracle.by_age()
        assert list(self.index.manifests()) == held
        for manifest in MANIFESTS:
            complete = manifest in held and self.oracle.trees[manifest] <= self.oracle.whole
            assert self.index.is_complete(manifest) == complete
        for manifest in held:
            assert self.index.contents_of(manifest) == self.contents_of(manifest)
            counted = self.oracle.trees[manifest] & (self.oracle.whole | self.oracle.partial)
            assert self.index.size_of(manifest) == self.oracle.total(counted)
            assert self.index.recency.last_used(manifest) == self.oracle.used_at[manifest]
        for content in CONTENTS:
            assert self.index.named_by(content) == {m for m in held if content in self.oracle.trees[m]}

    @invariant()
    def leases_are_those_of_the_model(self) -> None:
        assert set(self.index.leases.leased()) == {manifest for manifest, _ in self.oracle.leases}
        for manifest in MANIFESTS:
            assert self.index.leases.holders(manifest) == self.oracle.holders(manifest)
            assert self.index.leases.is_leased(manifest) == bool(self.oracle.holders(manifest))
        assert at_once(self.index.counting_leased()) == self.oracle.total(self.oracle.leased_contents())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=10_000 if FULL else settings().max_examples * 2,
    stateful_step_count=100 if FULL else settings().stateful_step_count,
)
