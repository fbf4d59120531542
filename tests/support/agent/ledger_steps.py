"""A million steps of a cache's rules on a disk of a thousand bytes that it shares with a neighbour, against plain sums.

Everything that is counted is counted anew at every step. A seed is a history: ``Disk(seed).run(steps)`` names the step that was
wrong, and runs up to it again.
"""

import random
from collections import Counter

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError, CacheTooSmallError
from node_agent.cache.space import TierBudgets, kept, share
from tests.support.content.names import named, stage

SIZE, HEADROOM, PERCENT = 1000, 50, 50
LIMITS = TierBudgets(node=600, cluster=0)
FLOOR = LIMITS.node * PERCENT // 100


class Disk:
    """The index under test, and what is really on the disk: ``whole`` and ``begun`` content, and ``foreign`` bytes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.size = {named(f"content {number}"): self.chance.choice([0, 1, 5, 20, 60, 90, 150]) for number in range(16)}
        contents = sorted(self.size)
        self.trees = {
            named(f"manifest {number}"): tuple(self.chance.sample(contents, self.chance.randrange(1, 5)))
            for number in range(9)
        }
        self.index = CacheIndex()
        self.held: set[Digest] = set()
        self.leased: dict[str, Digest] = {}  # each stage has one manifest
        self.whole: set[Digest] = set()
        self.begun: set[Digest] = set()
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

    # --- the truth ---

    def bytes_of(self, contents: set[Digest]) -> int:
        return sum(self.size[content] for content in contents)

    @property
    def used(self) -> int:
        return self.bytes_of(self.whole) + self.bytes_of(self.begun)

    @property
    def protected(self) -> set[Digest]:
        return {content for manifest in self.leased.values() for content in self.trees[manifest]}

    def budget(self) -> int:
        """As ``Space`` asks for it: held + free - headroom is what is there."""
        there = SIZE - self.foreign - HEADROOM
        keep = kept(TierBudgets(self.index.ledger.used_bytes, 0), LIMITS, SIZE - HEADROOM, PERCENT)
        return share(there, LIMITS, keep).node

    def forget(self, manifests: set[Digest]) -> None:
        self.held -= manifests
        self.leased = {name: manifest for name, manifest in self.leased.items() if manifest not in manifests}
        named_still = {content for manifest in self.held for content in self.trees[manifest]}
        self.whole &= named_still
        self.begun &= named_still

    def check(self) -> None:
        ledger = self.index.ledger
        assert ledger.committed_bytes == self.bytes_of(self.whole), "committed bytes"
        assert ledger.reserved_bytes == self.bytes_of(self.begun), "reserved bytes"
        assert ledger.used_bytes <= LIMITS.node, "beyond the limit"
        assert ledger.used_bytes + self.foreign <= SIZE, "more than the disk"
        for manifest in self.leased.values():
            assert manifest in self.held, "a leased manifest is gone"

    # --- steps ---

    def admit(self) -> None:
        manifest = self.chance.choice(sorted(self.trees))
        name, contents = f"s{self.chance.randrange(5)}", {one: self.size[one] for one in self.trees[manifest]}
        if self.leased.get(name, manifest) != manifest:
            return
        self.now += self.chance.choice([-1, 0, 1, 1])
        before, protected, budget = self.used, self.protected, self.budget()
        try:
            admission = self.index.admit(manifest, contents, stage(name), now=self.now, budget=budget)
        except (CacheFullError, CacheTooSmallError):
            self.counts["refused"] += 1
            return
        gone = {victim.manifest for victim in admission.victims}
        assert not gone & set(self.leased.values()), "a leased manifest was evicted"
        assert not protected & {content for victim in admission.victims for content in victim.contents}
        absent = set(contents) - self.whole - self.begun
        self.held.add(manifest)
        self.forget(gone)
        self.begun |= absent
        self.leased[name] = manifest
        if self.bytes_of(absent):
            assert self.used <= budget, "committed and reserved are more than the budget"
            most = max(SIZE - HEADROOM, before + self.foreign)
            assert self.used + self.foreign <= most, "a stage brought more than there was and than it evicted"

    def commit(self) -> None:
        if self.begun:
            content = self.chance.choice(sorted(self.begun))
            self.index.commit(content)
            self.begun.remove(content)
            self.whole.add(content)

    def leave(self) -> None:
        name = f"s{self.chance.randrange(5)}"
        self.index.leases.end(name)
        self.leased.pop(name, None)

    def trim(self) -> None:
        used, budget = self.used, self.budget()
        if used > budget:
            plan = self.index.plan_lru(used - budget)
            self.index.evict(plan)
            self.forget({victim.manifest for victim in plan.victims})
            assert used > FLOOR, "others took what is kept"
            assert self.used <= self.budget() or self.held <= set(self.leased.values()), "still over the budget"
        self.counts["faults"] += budget < LIMITS.node

    def neighbour(self) -> None:
        """Somebody else writes or deletes; the kernel gives him what is free."""
        self.foreign = self.chance.choice([0, 200, 500, SIZE])
        self.foreign = min(self.foreign, SIZE - self.used)

    def evict(self) -> None:
        force = self.chance.random() < 0.3
        plan = self.index.plan(self.chance.sample(sorted(self.trees), 2), force=force)
        assert force or not {victim.manifest for victim in plan.victims} & set(self.leased.values())
        self.index.evict(plan)
        self.forget({victim.manifest for victim in plan.victims})
        self.counts["refused"] += len(plan.refused)

    def lose(self) -> None:
        content = self.chance.choice(sorted(self.size))
        self.index.lose(content)
        self.whole.discard(content)
        self.begun.discard(content)

    def restart(self) -> None:
        """The index is made anew from the disk: what was only promised is promised no more."""
        self.begun = {content for content in self.begun if self.chance.random() < 0.5}
        order = self.index.manifests()
        last_used = {manifest: self.index.recency.last_used(manifest) for manifest in order}
        self.index = CacheIndex()
        for manifest in order:
            present = {one: one in self.whole for one in self.trees[manifest] if one in self.whole | self.begun}
            contents = {one: self.size[one] for one in self.trees[manifest]}
            self.index.restore(manifest, contents, present, last_used=last_used[manifest])
        for name, manifest in self.leased.items():
            self.index.leases.take(manifest, stage(name))
