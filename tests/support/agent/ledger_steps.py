"""A million steps of a cache's rules, against the oracle, on a disk of a thousand bytes that a neighbour shares.

A seed is a history: ``Disk(seed).run(steps)`` names the step that was wrong, and runs up to it again.
"""

import random
from collections import Counter

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError
from node_agent.cache.space import TierBudgets, kept, share
from tests.support.agent.cache_oracle import Admitted, CacheOracle
from tests.support.content.names import named, stage

SIZE, HEADROOM, PERCENT = 1000, 50, 50
LIMITS = TierBudgets(node=600, cluster=0)
FLOOR = LIMITS.node * PERCENT // 100


class Disk:
    """The index under test, the oracle that says what is really on the disk, and the neighbour's ``foreign`` bytes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        contents = [named(f"content {number}") for number in range(16)]
        trees = {
            named(f"manifest {number}"): frozenset(self.chance.sample(contents, self.chance.randrange(1, 5)))
            for number in range(9)
        }
        self.oracle = CacheOracle(trees, {one: self.chance.choice([0, 1, 5, 20, 60, 90, 150]) for one in contents})
        self.index = CacheIndex()
        self.foreign = 0
        self.now = 0.0
        self.counts: Counter[str] = Counter()

    def run(self, steps: int) -> Counter[str]:
        """Take so many steps; an ``AssertionError`` says at which one what was wrong."""
        operations = [self.admit] * 6 + [self.commit] * 6 + [self.leave] * 4 + [self.trim] * 2 + [self.neighbour] * 3
        operations += [self.evict, self.lose, self.restart]
        for step in range(steps):
            operation = self.chance.choice(operations)
            try:
                operation()
                self.check()
            except AssertionError as error:
                msg = f"seed {self.seed}, step {step} ({operation.__name__}): {error}"
                raise AssertionError(msg) from error
        self.counts["scenarios"] += steps
        return self.counts

    def budget(self) -> int:
        """As ``Space`` asks for it: held + free - headroom is what is there."""
        there = SIZE - self.foreign - HEADROOM
        keep = kept(TierBudgets(self.index.ledger.used_bytes, 0), LIMITS, SIZE - HEADROOM, PERCENT)
        return share(there, LIMITS, keep).node

    def contents_of(self, manifest: Digest) -> dict[Digest, int]:
        return {content: self.oracle.size[content] for content in sorted(self.oracle.trees[manifest])}

    def check(self) -> None:
        ledger, oracle = self.index.ledger, self.oracle
        assert ledger.committed_bytes == oracle.total(oracle.whole), "committed bytes"
        assert ledger.reserved_bytes == oracle.total(oracle.partial), "reserved bytes"
        assert ledger.used_bytes <= LIMITS.node, "beyond the limit"
        assert ledger.used_bytes + self.foreign <= SIZE, "more than the disk"
        assert {manifest for manifest, _ in oracle.leases} <= {*self.index.manifests()}, "a leased manifest is gone"

    # --- steps ---

    def admit(self) -> None:
        manifest, holder = self.chance.choice(sorted(self.oracle.trees)), stage(f"s{self.chance.randrange(5)}")
        self.now += self.chance.choice([-1, 0, 1, 1])
        before, protected, budget = self.oracle.used(), self.oracle.leased_contents(), self.budget()
        verdict = self.oracle.admit(manifest, holder, now=self.now, budget=budget)
        try:
            admission = self.index.admit(manifest, self.contents_of(manifest), holder, now=self.now, budget=budget)
        except (CacheFullError, CacheTooSmallError):
            assert not isinstance(verdict, Admitted), "a manifest for which there is room was refused"
            self.counts["refused"] += 1
            return
        assert isinstance(verdict, Admitted), "a manifest was let in for which there is no room"
        assert not any(victim.holders for victim in admission.victims), "a leased manifest was evicted"
        assert not protected & {content for victim in admission.victims for content in victim.contents}
        if verdict.promised:
            assert self.oracle.used() <= budget, "committed and reserved are more than the budget"
            most = max(SIZE - HEADROOM, before + self.foreign)
            assert self.oracle.used() + self.foreign <= most, "a stage brought more than there was and than it evicted"

    def commit(self) -> None:
        if self.oracle.partial:
            content = self.chance.choice(sorted(self.oracle.partial))
            self.index.commit(content)
            self.oracle.partial.remove(content)
            self.oracle.whole.add(content)

    def leave(self) -> None:
        name = f"s{self.chance.randrange(5)}"
        self.index.leases.end(name)
        self.oracle.end(name)

    def trim(self) -> None:
        used, budget = self.oracle.used(), self.budget()
        if used > budget:
            gone, _ = self.oracle.plan_lru(used - budget, force=False)
            self.index.evict(self.index.plan_lru(used - budget))
            self.oracle.remove(gone)
            leased = {manifest for manifest, _ in self.oracle.leases}
            assert used > FLOOR, "others took what is kept"
            assert self.oracle.used() <= self.budget() or self.oracle.used_at.keys() <= leased, "still over the budget"
        self.counts["faults"] += budget < LIMITS.node

    def neighbour(self) -> None:
        """Somebody else writes or deletes; the kernel gives him what is free."""
        self.foreign = min(self.chance.choice([0, 200, 500, SIZE]), SIZE - self.oracle.used())

    def evict(self) -> None:
        asked, force = self.chance.sample(sorted(self.oracle.trees), 2), self.chance.random() < 0.3
        gone, refused = self.oracle.plan(asked, force=force)
        plan = self.index.plan(asked, force=force)
        assert force or not any(victim.holders for victim in plan.victims)
        self.index.evict(plan)
        self.oracle.remove(gone)
        self.counts["refused"] += len(refused)

    def lose(self) -> None:
        content = self.chance.choice(sorted(self.oracle.size))
        self.index.lose(content)
        self.oracle.whole.discard(content)
        self.oracle.partial.discard(content)

    def restart(self) -> None:
        """The index is made anew from the disk: what was only promised is promised no more."""
        order, oracle = self.index.manifests(), self.oracle
        oracle.restart(order, {content for content in sorted(oracle.partial) if self.chance.random() < 0.5})
        self.index = CacheIndex()
        for manifest in order:
            present = {one: one in oracle.whole for one in oracle.trees[manifest] & (oracle.whole | oracle.partial)}
            contents = self.contents_of(manifest)
            self.index.restore(manifest, contents, present, last_used=oracle.used_at[manifest])
        for manifest, holder in oracle.leases:
            self.index.leases.take(manifest, holder)
