"""The order of use against the plain history of all touches."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bdn.core.cache.index import RecencyOrder
from bdn.core.chunk import Digest
from tests.support.content.names import named

MANIFESTS = [named(f"manifest {number}") for number in range(5)]


class RecencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = RecencyOrder()
        self.history: list[tuple[Digest, int]] = []

    @rule(manifest=st.sampled_from(MANIFESTS), now=st.integers(0, 5))
    def touch(self, manifest: Digest, now: int) -> None:
        self.order.touch(manifest, now)
        self.history.append((manifest, now))

    @rule(manifest=st.sampled_from(MANIFESTS))
    def forget(self, manifest: Digest) -> None:
        self.order.forget(manifest)
        self.history = [(touched, at) for touched, at in self.history if touched != manifest]

    @invariant()
    def the_order_is_by_latest_time_and_then_by_last_touch(self) -> None:
        touched = [manifest for manifest, _ in self.history]
        latest = {manifest: max(at for other, at in self.history if other == manifest) for manifest in touched}
        last_touch = {manifest: position for position, manifest in enumerate(touched)}
        assert list(self.order.oldest_first()) == sorted(latest, key=lambda m: (latest[m], last_touch[m]))
        assert {manifest: self.order.last_used(manifest) for manifest in latest} == latest


TestRecencyMachine = RecencyMachine.TestCase
TestRecencyMachine.settings = settings(max_examples=settings().max_examples // 2)
