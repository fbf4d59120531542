"""The book of leases against a plain list of pairs in the order of their taking."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bdn.core.cache.index import Holder, LeaseBook
from bdn.core.chunk import Digest
from tests.support.content.names import named, stage

MANIFESTS = [named(f"manifest {number}") for number in range(4)]
STAGES = ["s0", "s1", "s2"]


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.taken: list[tuple[Digest, Holder]] = []

    def held_by(self, stage_id: str) -> set[Digest]:
        return {manifest for manifest, holder in self.taken if holder.stage_id == stage_id}

    @rule(
        manifest=st.sampled_from(MANIFESTS),
        stage_id=st.sampled_from(STAGES),
        until=st.one_of(st.none(), st.integers(0, 9)),
    )
    def take_or_renew(self, manifest: Digest, stage_id: str, until: float | None) -> None:
        holder = stage(stage_id, until=until)
        self.book.take(manifest, holder)
        if manifest in self.held_by(stage_id):
            self.taken = [
                (held, holder if (held, had.stage_id) == (manifest, stage_id) else had) for held, had in self.taken
            ]
        else:
            self.taken.append((manifest, holder))

    @rule(stage_id=st.sampled_from(STAGES))
    def end(self, stage_id: str) -> None:
        ended = self.book.end(stage_id)
        assert len(ended) == len(set(ended))
        assert set(ended) == self.held_by(stage_id)
        self.taken = [(manifest, holder) for manifest, holder in self.taken if holder.stage_id != stage_id]

    @rule(now=st.integers(-1, 10))
    def ask_who_expired(self, now: int) -> None:
        over = [holder.stage_id for holder in self.book.expired(now)]
        assert sorted(over) == sorted(
            {holder.stage_id for _, holder in self.taken if holder.expires_at is not None and holder.expires_at <= now}
        )

    @invariant()
    def every_manifest_has_the_holders_of_the_model(self) -> None:
        leased = self.book.leased()
        assert len(leased) == len(set(leased))
        assert set(leased) == {manifest for manifest, _ in self.taken}
        for manifest in MANIFESTS:
            expected = tuple(holder for held, holder in self.taken if held == manifest)
            assert self.book.holders(manifest) == expected
            assert self.book.is_leased(manifest) == bool(expected)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=settings().max_examples // 2)
