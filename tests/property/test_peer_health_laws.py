"""Whatever peers do, each is avoided for a bounded time, and deadlines follow everything that came."""

from math import ceil
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth
from node_agent.fetch.fill_context import RetryBudget

PEERS = ["a", "b", "c"]
peers = st.sampled_from(PEERS)


class HealthMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.health = PeerHealth()
        self.now = 0.0
        self.blamed: dict[str, list[tuple[float, Fault]]] = {peer: [] for peer in PEERS}
        self.tried: dict[str, float] = {}  # trials that nobody reported, by when they began
        self.is_trusted = dict.fromkeys(PEERS, True)  # whether all may ask once it is not avoided

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 29.0, 61.0, 601.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(peer=peers, fault=st.sampled_from(Fault))
    def blame(self, peer: str, fault: Fault) -> None:
        self.health.blame(peer, fault, self.now)
        self.blamed[peer].append((self.now, fault))
        self.tried.pop(peer, None)
        self.is_trusted[peer] = False
        assert self.health.is_avoided(peer, self.now)

    @rule(peer=peers)
    def claim(self, peer: str) -> None:
        was_avoided = self.health.is_avoided(peer, self.now)
        assert self.health.claim(peer, self.now) == (not was_avoided)
        if not was_avoided and not self.is_trusted[peer]:
            assert self.now >= self.tried.get(peer, -30.0) + 30.0
            self.tried[peer] = self.now
            assert self.health.is_avoided(peer, self.now)

    @rule(peer=peers)
    def succeed(self, peer: str) -> None:
        is_tried = peer in self.tried
        self.health.succeeded(peer, self.now)
        if is_tried:
            del self.tried[peer]
            self.is_trusted[peer] = True
        if self.is_trusted[peer]:
            assert not self.health.is_avoided(peer, self.now)
        elif not self.health.is_avoided(peer, self.now):
            self.is_trusted[peer] = True

    @rule(kept=st.sets(peers))
    def keep(self, kept: set[str]) -> None:
        self.health.keep(kept)
        for peer in set(PEERS) - kept:
            self.blamed[peer] = []
            self.tried.pop(peer, None)
            self.is_trusted[peer] = True

    @invariant()
    def nobody_is_avoided_without_or_for_longer_than_its_faults(self) -> None:
        for peer in PEERS:
            faults = self.blamed[peer]
            longest = 60 if all(fault is Fault.FAILED for _, fault in faults) else 600
            last = faults[-1][0] if faults else -1000.0
            if self.health.is_avoided(peer, self.now):
                assert self.now < max(last + longest, self.tried.get(peer, -30.0) + 30.0)

    @invariant()
    def after_a_lie_a_peer_is_avoided_for_half_a_minute(self) -> None:
        for peer in PEERS:
            if any(fault is Fault.WRONG and self.now < at + 30 for at, fault in self.blamed[peer]):
                assert self.health.is_avoided(peer, self.now)

    @invariant()
    def those_who_are_avoided_are_told(self) -> None:
        assert self.health.avoided(self.now) == tuple(peer for peer in PEERS if self.health.is_avoided(peer, self.now))


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=settings().max_examples // 2)


MIB = 1024 * 1024
arrivals = st.tuples(st.integers(0, 8 * MIB), st.floats(0, 60))


@given(came=st.lists(st.one_of(arrivals, st.none()), max_size=300), size=st.integers(0, 8 * MIB))
def test_it_is_in_proportion_to_the_percentile_of_the_last_two_hundred(
    came: list[tuple[int, float] | None], size: int
) -> None:
    deadlines = Deadlines()
    paces: list[float] = []

    def tail() -> float:
        last = sorted(paces[-200:])
        return last[ceil(0.99 * len(last)) - 1]

    for one in came:
        if one is not None:
            deadlines.came(*one)
            paces.append(one[1] / (one[0] + MIB))
        else:
            deadlines.left()
            paces += [tail()] if paces else []
    slack = 4 if len(paces) < 100 else 2
    expected = 300.0 if len(paces) < 8 else min(300.0, max(1.0, slack * tail() * (size + MIB)))
    assert deadlines.deadline(size) == expected


@given(seed=st.integers(0, 10**6))
def test_a_source_that_stays_as_it_is_rarely_meets_its_deadline(seed: int) -> None:
    random, missed = Random(seed), 0
    deadlines = Deadlines(shortest=0.0)
    for _ in range(500):
        seconds = 0.05 + random.expovariate(20)
        if seconds > deadlines.deadline(8 * MIB):
            deadlines.left()
            missed += 1
        else:
            deadlines.came(8 * MIB, seconds)
    assert missed <= 5


@given(stage_size=st.integers(0, 10_000), sizes=st.lists(st.integers(0, 300), max_size=60))
def test_what_was_allowed_is_never_more_than_the_share(stage_size: int, sizes: list[int]) -> None:
    budget = RetryBudget(stage_size, list)
    allowed = 0
    for size in sizes:
        fits = (allowed + size) * 20 <= stage_size
        assert budget.hedge(size) == fits
        allowed += size if fits else 0
        assert budget.document().bytes_hedged == allowed
